"""What jobs took, over HTTP: told, remembered, set aside."""

import asyncio
import base64
import errno
import json
import os
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from served import GPUMEMNET, MLP, SIMULATED, TABLE, Service, on_loopback, serving

from vramcast.collocation.client import Client
from vramcast.collocation.commands import observe_command as observe
from vramcast.collocation.commands import place_command as place
from vramcast.collocation.commands import serve_command as serve
from vramcast.collocation.observed_peak import REPEAT_MARGIN
from vramcast.collocation.service import engine, history, history_file
from vramcast.collocation.service.settings import Limits, Settings
from vramcast.collocation.service.worker_pool import LostError, OverloadedError, PoolError
from vramcast.dataset_builder.store.lines import encode_line
from vramcast.errors import UserError

JOB = {"spec": MLP, "device": "t4"}
TRAINING = {"batch_size": 4, "optimizer": "SGD(momentum=0.9,lr=0.1)"}


def run(scenario: Callable[[Service], Awaitable[None]], settings: Settings | None = None) -> None:
    async def whole() -> None:
        async with serving(settings) as service:
            await scenario(service)

    asyncio.run(whole())


async def tell(service: Service, job: Any, peak_mib: float, **more: Any) -> dict[str, Any]:
    found = await service.post("/v1/observations", {"job": job, "peak_mib": peak_mib, **more})
    assert found.status == 200, found.body
    return dict(found.json)


async def ask(service: Service, job: Any) -> dict[str, Any]:
    found = await service.post("/v1/classify", job)
    assert found.status == 200, found.body
    return dict(found.json)


async def runs(service: Service, job: Any) -> int:
    observed = (await ask(service, job))["observed"]
    return observed["runs"] if observed else 0


def test_what_was_observed_stands_beside_the_forecast_which_stays() -> None:
    async def scenario(service: Service) -> None:
        before = await ask(service, JOB)
        assert (before["basis"], before["observed"], before["need_mib"]) == ("forecast", None, before["safe_mib"])
        assert await ask(service, JOB) == before, "kept"
        told = await tell(service, JOB, 3000)
        assert told == {"status": "ok", "device": "t4", "runs": 1, "peak_mib": 3000}
        after = await ask(service, JOB)
        assert (after["basis"], after["observed"]) == ("observed", {"runs": 1, "peak_mib": 3000})
        assert after["need_mib"] == pytest.approx(3000 * (1 + REPEAT_MARGIN)), "above the bound, too"
        forecast = {key: value for key, value in before.items() if key not in ("basis", "observed", "need_mib")}
        assert {**after, **forecast} == {**after, "seconds": before["seconds"]}
        assert await tell(service, JOB, 200) == {**told, "runs": 2}, "the highest counts"
        assert await runs(service, JOB) == 2, "and what was kept before is not given again"
        assert await ask(service, JOB) == await ask(service, JOB)

    run(scenario)


def test_less_than_the_forecast_is_set_aside_where_less_was_seen() -> None:
    async def scenario(service: Service) -> None:
        forecast = (await ask(service, JOB))["safe_mib"]
        await tell(service, JOB, forecast * 0.6)
        assert (await ask(service, JOB))["need_mib"] == pytest.approx(forecast * 0.6 * (1 + REPEAT_MARGIN))

    run(scenario)


def test_kept_answers_go_only_with_the_jobs_that_they_are_about() -> None:
    async def scenario(service: Service) -> None:
        other = {**JOB, "spec": {**MLP, "training": {"batch_size": 16}}}
        await ask(service, other)
        both = {"jobs": [JOB, other]}
        await ask(service, both)
        asked = sum(service.engine.checkpoint.batches)
        await tell(service, JOB, 3000)
        await ask(service, other)
        assert sum(service.engine.checkpoint.batches) == asked
        assert [item["basis"] for item in (await ask(service, both))["answers"]] == ["observed", "forecast"]

    run(scenario)


def test_an_answer_during_which_a_run_was_told_of_is_not_kept() -> None:
    same = {**JOB, "spec": {**MLP, "training": {**MLP["training"], "optimizer": "Adam(lr=0.3)"}}}  # type: ignore[dict-item]

    async def scenario(service: Service) -> None:
        await ask(service, JOB)
        service.pool.hold = asyncio.Event()
        both = asyncio.create_task(ask(service, {"jobs": [JOB, same]}))
        while service.engine.batcher.answered < 2:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)  # the first has looked, the other waits for its trace
        await tell(service, JOB, 3000)
        service.pool.hold.set()
        assert [item["basis"] for item in (await both)["answers"]] == ["forecast", "observed"]
        again = await ask(service, {"jobs": [JOB, same]})
        assert [item["basis"] for item in again["answers"]] == ["observed", "observed"]

    run(scenario)


def test_a_job_is_known_however_it_is_spelled(tmp_path: Path) -> None:
    known = tmp_path / "known.jsonl"
    spelled_out = {
        "family": "mlp",
        "network": {"depth": 2, "output_features": 2, "input_features": 64, "arch": "pyramid", "activation": "relu"},
        "training": {"optimizer": "Adam()", "batch_size": 8, "loss": "cross_entropy", "accumulate": 1},
    }
    known.write_text(json.dumps({"name": "mine", "spec": {**spelled_out, "training": MLP["training"]}}) + "\n")

    async def scenario(service: Service) -> None:
        await tell(service, {"spec": MLP}, 900)
        for job in (
            {"spec": spelled_out},
            {"spec": {**spelled_out, "training": {**spelled_out["training"], "optimizer": "Adam(lr=0.3)"}}},
            {"name": "mine"},
            {"spec": MLP, "device": "a100_40gb", "risk": 0.2, "bucket_mib": 64, "distribution": True},
        ):
            assert await runs(service, job) == 1, job
        text = json.dumps(spelled_out).encode()
        assert b"basis=observed" in (await service.post("/v1/slurm", text, content_type="text/plain")).body
        for job in (
            {"spec": {**MLP, "training": {"batch_size": 9}}},
            {"spec": MLP, "device": "t4"},
            {"name": GPUMEMNET},
        ):
            assert await runs(service, job) == 0, job

    run(scenario, Settings(named_specs=known))


def test_tables_and_features_are_known_too() -> None:
    named = {**TABLE, "layers": [{**layer, "name": "x", "functional": False} for layer in TABLE["layers"]]}  # type: ignore[union-attr]
    same = {**TRAINING, "optimizer": "SGD(lr=0.1, momentum=0.9)", "dtype": "fp32"}

    async def scenario(service: Service) -> None:
        table = {"table": TABLE, "training": TRAINING}
        await tell(service, table, 900)
        assert await runs(service, {"table": named, "training": same}) == 1
        assert await runs(service, {"table": {**TABLE, "input_elements": 11}, "training": same}) == 0
        features = {**table, "simulated": SIMULATED}
        assert await runs(service, {"features": features}) == 0, "two networks may have one table"
        await tell(service, {"features": features}, 700)
        assert await runs(service, {"features": {**features, "table": named, "training": same, "family": "mlp"}}) == 1
        assert await runs(service, {"features": {**features, "simulated": {**SIMULATED, "allocated_bytes": 1}}}) == 0

    run(scenario)


def test_the_card_that_it_ran_on_goes_before_the_one_that_was_asked_for() -> None:
    async def scenario(service: Service) -> None:
        assert (await tell(service, JOB, 900, device="v100_16gb"))["device"] == "v100_16gb"
        assert (await tell(service, JOB, 900))["device"] == "t4"
        assert (await tell(service, {"spec": MLP}, 900))["device"] == "a100_40gb"
        assert [await runs(service, {**JOB, "device": name}) for name in ("v100_16gb", "t4", "a100_40gb")] == [1, 1, 1]

    run(scenario)


def test_placements_set_aside_what_was_observed() -> None:
    async def scenario(service: Service) -> None:
        gpus = [{"id": str(free), "free_mib": free, "device": "t4"} for free in (3100, 3200)] + [
            {"id": "other", "free_mib": 3000}
        ]
        body = {"job": {"spec": MLP}, "gpus": gpus}
        before = (await service.post("/v1/placements", body)).json
        assert {item["basis"] for item in before["placements"]} == {"forecast"}
        await tell(service, JOB, 3000)
        after = (await service.post("/v1/placements", body)).json
        assert {item["gpu"]: item["basis"] for item in after["placements"]} == {"3200": "observed", "other": "forecast"}
        assert after["refused"][0]["reason"] == "needs 3150 MiB, 3100 are free"
        assert {name: item["basis"] for name, item in after["answers"].items()} == {
            "t4": "observed", "a100_40gb": "forecast"
        }  # fmt: skip

    run(scenario)


def test_the_extender_the_webhook_and_slurm_set_it_aside_too() -> None:
    pod = {
        "metadata": {"name": "p", "annotations": {"vramcast/job": json.dumps(MLP)}},
        "spec": {"containers": [{"name": "c"}]},
    }
    gpu = json.dumps([{"id": "0", "free_mib": 3100, "total_mib": 40960}])
    args = {"Pod": pod, "Nodes": {"items": [{"metadata": {"name": "n", "annotations": {"vramcast/gpus": gpu}}}]}}

    async def patched(service: Service) -> dict[str, Any]:
        found = await service.post("/k8s/mutate", {"request": {"uid": "u", "object": pod}})
        patch = json.loads(base64.b64decode(found.json["response"]["patch"]))
        return {step["path"].rpartition("/")[2]: step["value"] for step in patch}

    async def scenario(service: Service) -> None:
        assert (await service.post("/k8s/filter", args)).json["FailedNodes"] == {}
        assert (await patched(service))["vramcast~1basis"] == "forecast"
        await tell(service, {"spec": MLP}, 3000)
        assert (await service.post("/k8s/filter", args)).json["FailedNodes"] == {"n": "needs 3150 MiB, 3100 are free"}
        notes = await patched(service)
        assert (notes["vramcast~1need-mib"], notes["vramcast~1basis"]) == ("3150", "observed")
        slurm = await service.post("/v1/slurm", json.dumps(MLP).encode(), content_type="text/plain")
        assert dict(line.split("=") for line in slurm.body.decode().splitlines()).items() >= {
            ("need_mib", "3150"), ("shards", "4"), ("basis", "observed")
        }  # fmt: skip

    run(scenario)


FAILED = (OverloadedError(), PoolError("no worker"), LostError("expected a quicker one"), UserError("expected"))


@pytest.mark.parametrize("error", FAILED, ids=lambda error: type(error).__name__)
def test_a_job_that_ran_needs_no_forecast(error: Exception) -> None:
    pod = {
        "metadata": {"name": "p", "annotations": {"vramcast/job": json.dumps(MLP)}},
        "spec": {"containers": [{"name": "c"}]},
    }
    gpu = json.dumps([{"id": "0", "free_mib": 3100, "total_mib": 15360, "device": "t4"}])
    args = {"Pod": pod, "Nodes": {"items": [{"metadata": {"name": "n", "annotations": {"vramcast/gpus": gpu}}}]}}
    body = {
        "job": {"spec": MLP},
        "gpus": [{"id": "0", "free_mib": 3200, "device": "t4"}, {"id": "1", "free_mib": 3200}],
    }

    async def scenario(service: Service) -> None:
        for device in ("t4", "a100_40gb"):
            await tell(service, {"spec": MLP}, 3000, device=device)
        service.pool.error = error
        slurm = await service.post("/v1/slurm", json.dumps(MLP).encode(), content_type="text/plain")
        assert slurm.body == b"need_mib=3150\nshards=4\ndevice=a100_40gb\nbasis=observed\n"
        assert (await service.post("/k8s/filter", args)).json["FailedNodes"] == {"n": "needs 3150 MiB, 3100 are free"}
        review = await service.post("/k8s/mutate", {"request": {"uid": "u", "object": pod}})
        assert b"3150" in base64.b64decode(review.json["response"]["patch"])
        assert service.pool.asked == [], "nothing was traced"
        placed = (await service.post("/v1/placements", body)).json
        assert [(item["gpu"], item["need_mib"], item["basis"]) for item in placed["placements"]] == [
            ("0", 3150.0, "observed"), ("1", 3150.0, "observed")
        ]  # fmt: skip
        assert placed["answers"] == {}
        assert (await service.post("/v1/classify", {"spec": MLP})).status in (422, 503), "which is a forecast"
        service.pool.error = None
        if not isinstance(error, UserError) or isinstance(error, LostError):
            placed = (await service.post("/v1/placements", body)).json
            assert set(placed["answers"]) == {"t4", "a100_40gb"}, "and what was given without them is not kept"
        assert (await service.post("/v1/observations", {"job": {"spec": MLP}, "forget": True})).status == 200
        service.pool.error = error
        other = {**body, "gpus": [*body["gpus"], {"id": "2", "free_mib": 3200, "device": "l4"}]}
        assert (await service.post("/v1/placements", other)).status in (422, 503), "seen on one of them alone"

    run(scenario)


def test_what_can_never_be_asked_for_is_not_remembered() -> None:
    async def scenario(service: Service) -> None:
        for job in (
            {"spec": {**MLP, "training": {"batch_size": 8, "optimizer": "Adan"}}},
            {"spec": {**MLP, "training": {"batch_size": 8, "last_batch_size": 9}}},
            {"spec": {**MLP, "network": {**MLP["network"], "depth": 3000}}},  # type: ignore[dict-item]
            {"table": TABLE, "training": {"batch_size": 8, "optimizer": "Adan"}},
            {"features": {"table": TABLE, "training": {"batch_size": 8, "optimizer": "Adan"}, "simulated": SIMULATED}},
        ):
            service.pool.asked.clear()
            told = await service.post("/v1/observations", {"job": job, "peak_mib": 900})
            assert service.pool.asked == [], "that took no trace"
            classified = await service.post("/v1/classify", job)
            assert (told.status, told.json["error"]) == (422, classified.json["error"]), job
        assert len(service.engine.history) == 0

    run(scenario)


def test_what_a_table_says_is_hashed_once_for_all_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[Any] = []
    id_of_table = engine.id_of_table
    monkeypatch.setattr(engine, "id_of_table", lambda job: hashed.append(job) or id_of_table(job))  # type: ignore[func-returns-value]

    async def scenario(service: Service) -> None:
        gpus = [{"id": name, "free_mib": 9000, "device": name} for name in ("t4", "l4", "v100_16gb")]
        body = {"job": {"table": TABLE, "training": TRAINING}, "gpus": gpus}
        assert len((await service.post("/v1/placements", body)).json["placements"]) == 3
        assert len(hashed) == 1

    run(scenario)


def test_what_ran_on_a_card_is_never_too_large_for_it() -> None:
    tight = {"spec": {**MLP, "training": {"batch_size": 2**24}}, "device": "t4"}

    async def scenario(service: Service) -> None:
        assert (await ask(service, tight))["verdict"] == "tight"
        whole = (await ask(service, tight))["capacity_mib"]
        await tell(service, tight, whole - 10)
        assert (await ask(service, tight))["need_mib"] == whole
        await tell(service, tight, 15360)
        assert (await ask(service, tight))["need_mib"] == 15360, (
            "more than the profile leaves, but that is what it took"
        )

    run(scenario)


def test_a_tight_job_gets_the_whole_card_until_it_was_seen() -> None:
    job = {"spec": {**MLP, "training": {"batch_size": 2**24}}, "device": "t4"}
    cards = [{"id": name, "free_mib": 15360, "total_mib": 23034, "device": name} for name in ("t4", "l4")]

    async def set_aside(service: Service) -> tuple[str, str]:
        slurm = await service.post("/v1/slurm", json.dumps(job).encode(), content_type="text/plain")
        nodes = [
            {"metadata": {"name": card["id"], "annotations": {"vramcast/gpus": json.dumps([{**card, "free_mib": 1}])}}}
            for card in cards
        ]
        pod = {"metadata": {"annotations": {"vramcast/job": json.dumps(job)}}}
        found = await service.post("/k8s/filter", {"Pod": pod, "Nodes": {"items": nodes}})
        return slurm.body.decode().splitlines()[0], found.json["FailedNodes"]["t4"]

    async def scenario(service: Service) -> None:
        found = await ask(service, job)
        whole, safe = found["capacity_mib"], found["safe_mib"]
        assert found["verdict"] == "tight"
        assert safe > whole
        assert await set_aside(service) == (f"need_mib={whole:.0f}", f"needs {whole:.0f} MiB, 1 are free")
        await tell(service, job, 9000)
        # beside a card that it was not seen on, with its forecast; by Slurm without
        assert await set_aside(service) == ("need_mib=9450", "needs 9450 MiB, 1 are free")

    run(scenario)


def test_several_are_told_at_once_and_a_bad_one_spoils_none() -> None:
    async def scenario(service: Service) -> None:
        one = {"job": JOB, "peak_mib": 900}
        found = await service.post(
            "/v1/observations",
            {"observations": [one, {**one, "peak_mib": 15361}, {"job": {"name": "x"}, "peak_mib": 1}, one]},
        )
        assert [item["status"] for item in found.json["answers"]] == ["ok", "error", "error", "ok"]
        assert "at most 15360, the memory of t4, found 15361" in found.json["answers"][1]["error"]
        assert await runs(service, JOB) == 2
        text = (await service.get("/metrics")).body.decode()
        assert "vramcast_remembered_jobs 1.0" in text
        assert 'vramcast_observations_total{outcome="remembered"} 2.0' in text

    run(scenario)


ONE = {"job": JOB, "peak_mib": 900}
WRONG = {
    "nothing": b"{}",
    "no peak": {"job": JOB},
    "no job": {"peak_mib": 1},
    "an unknown key": {**ONE, "risk": 0.1},
    "text": {**ONE, "peak_mib": "900"},
    "true": {**ONE, "peak_mib": True},
    "null": {**ONE, "peak_mib": None},
    "zero": {**ONE, "peak_mib": 0},
    "below zero": {**ONE, "peak_mib": -1},
    "more than the card": {**ONE, "peak_mib": 15360.5},
    "less than CUDA": {**ONE, "peak_mib": 180},
    "to forget and to remember": {**ONE, "forget": True},
    "not to forget": {"job": JOB, "forget": False},
    "to forget several": {"observations": [ONE], "forget": True},
    "huge": {**ONE, "peak_mib": 1e308},
    "a number without end": b'{"job": {"name": "x"}, "peak_mib": ' + b"9" * 5000 + b"}",
    "another device": {**ONE, "device": "abacus"},
    "a device as a list": {**ONE, "device": ["t4"]},
    "jobs": {**ONE, "job": {"jobs": [JOB]}},
    "an observation in one": {**ONE, "job": ONE},
    "none": {"observations": []},
    "too many": {"observations": [ONE] * 65},
    "several in several": {"observations": [{"observations": [ONE]}]},
    "one and several": {**ONE, "observations": [ONE]},
    "a list": [ONE],
    "nan": b'{"job": {"name": "x"}, "peak_mib": NaN}',
    "infinity": b'{"job": {"name": "x"}, "peak_mib": Infinity}',
    "deep": b'{"job":' * 20_000 + b"1" + b"}" * 20_000,
}


@pytest.mark.parametrize("body", WRONG.values(), ids=WRONG)
def test_what_is_no_observation_is_refused_with_a_sentence(body: Any) -> None:
    async def scenario(service: Service) -> None:
        found = await service.post("/v1/observations", body)
        assert found.status in (400, 422), found.body
        assert found.json["error"].startswith("expected")
        assert len(service.engine.history) == 0

    run(scenario)


def test_a_peak_that_no_process_can_have_says_what_was_meant() -> None:
    async def scenario(service: Service) -> None:
        found = await service.post("/v1/observations", {**ONE, "peak_mib": 15})  # GiB
        assert found.status == 422
        assert found.json["error"] == (
            "expected peak_mib above 180, which CUDA alone takes on t4, found 15: "
            "report the memory of the whole process as nvidia-smi shows it, in MiB"
        )
        await tell(service, JOB, 180.5)

    run(scenario)


def test_a_wrong_peak_is_taken_back_for_good(tmp_path: Path) -> None:
    settings = Settings(history=tmp_path / "history.jsonl")
    forget = {"job": JOB, "forget": True}

    async def scenario(service: Service) -> None:
        before = await ask(service, JOB)
        await tell(service, JOB, 9000)
        await tell(service, JOB, 900, device="v100_16gb")
        assert (await ask(service, JOB))["basis"] == "observed"
        found = await service.post("/v1/observations", forget)
        assert found.json == {"status": "ok", "device": "t4", "runs": 0, "peak_mib": None}
        assert await ask(service, JOB) == {**before, "seconds": (await ask(service, JOB))["seconds"]}
        assert await runs(service, {**JOB, "device": "v100_16gb"}) == 1, "which is another job"
        told = [forget, {**ONE, "peak_mib": 500}, {"job": {"name": "x"}, "forget": True}, forget]
        several = await service.post("/v1/observations", {"observations": told})
        assert [item.get("runs") for item in several.json["answers"]] == [0, 1, None, 0], "in their order"
        assert 'outcome="forgotten"} 3.0' in (await service.get("/metrics")).body.decode()

    async def again(service: Service) -> None:
        assert await runs(service, JOB) == 0
        assert await tell(service, JOB, 900) == {"status": "ok", "device": "t4", "runs": 1, "peak_mib": 900}

    run(scenario, settings)
    run(again, settings)


def test_the_token_is_asked_for() -> None:
    async def scenario(service: Service) -> None:
        assert (await service.post("/v1/observations", ONE)).status == 401
        assert (await service.post("/v1/observations", ONE, authorization="Bearer secret")).status == 200

    run(scenario, Settings(token="secret"))


def test_without_a_file_it_is_forgotten_and_with_one_it_is_kept(tmp_path: Path) -> None:
    kept = Settings(history=tmp_path / "new" / "history.jsonl")
    for settings, expected in ((Settings(), [0, 0]), (kept, [0, 1])):
        seen = []

        async def scenario(service: Service, seen: list[int] = seen) -> None:
            seen.append(await runs(service, JOB))
            await tell(service, JOB, 900)

        run(scenario, settings)
        run(scenario, settings)
        assert seen == expected


def test_jobs_that_nobody_asks_for_are_forgotten_first() -> None:
    def job(batch_size: int) -> dict[str, Any]:
        return {**JOB, "spec": {**MLP, "training": {"batch_size": batch_size}}}

    async def scenario(service: Service) -> None:
        for size in (1, 2):
            await tell(service, job(size), 900)
        assert await runs(service, job(1)) == 1
        assert await runs(service, job(1)) == 1, "a kept answer counts as asked"
        await ask(service, job(2))
        await ask(service, job(1))
        await tell(service, job(3), 900)
        assert [await runs(service, job(size)) for size in (3, 2, 1)] == [1, 0, 1]
        assert len(service.engine.history) == 2

    run(scenario, Settings(limits=Limits(history_jobs=2)))


def test_observations_at_once_are_all_counted_and_share_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(history=tmp_path / "history.jsonl")
    synced, sync = [], os.fsync

    async def scenario(service: Service) -> None:
        monkeypatch.setattr(history_file.os, "fsync", lambda fd: synced.append(sync(fd)))
        told = await asyncio.gather(*(tell(service, JOB, 200 + index) for index in range(200)))
        monkeypatch.undo()
        assert sorted(item["runs"] for item in told) == list(range(1, 201))

    async def again(service: Service) -> None:
        assert (await ask(service, JOB))["observed"] == {"runs": 200, "peak_mib": 399}

    run(scenario, settings)
    assert len(synced) < 100
    run(again, settings)


def test_a_full_disk_is_told_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(history=tmp_path / "history.jsonl")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def scenario(service: Service) -> None:
        await tell(service, JOB, 900)
        before = await ask(service, JOB)
        for call in ("write", "fsync"):
            monkeypatch.setattr(history_file.os, call, full)
            for body in ({**ONE, "peak_mib": 5000}, {"observations": [ONE, ONE]}):
                found = await service.post("/v1/observations", body)
                assert found.status == 507
                assert "No space left on device" in found.json["error"]
                assert str(tmp_path) not in found.json["error"]
            assert await ask(service, JOB) == before
            monkeypatch.undo()
        assert await tell(service, JOB, 800) == {"status": "ok", "device": "t4", "runs": 2, "peak_mib": 900}
        text = (await service.get("/metrics")).body.decode()
        assert 'vramcast_observations_total{outcome="not stored"} 6.0' in text

    async def again(service: Service) -> None:
        assert (await ask(service, JOB))["observed"] == {"runs": 2, "peak_mib": 900}

    run(scenario, settings)
    run(again, settings)


def test_of_several_those_that_were_stored_are_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_LARGEST_BATCH", 1)

    async def scenario(service: Service) -> None:
        append, appended = history_file.HistoryFile.append, []

        def once(self: history_file.HistoryFile, changes: Any) -> None:
            appended.append(changes)
            if len(appended) > 1:
                raise history_file.NotStoredError("no room")
            append(self, changes)

        monkeypatch.setattr(history_file.HistoryFile, "append", once)
        found = await service.post("/v1/observations", {"observations": [ONE, ONE, {**ONE, "peak_mib": 1}]})
        assert found.status == 200
        assert [item["status"] for item in found.json["answers"]] == ["ok", "error", "error"]
        assert "expected to store what was observed, found: no room" in found.json["answers"][1]["error"]
        found = await service.post("/v1/observations", {"observations": [ONE, {**ONE, "peak_mib": 1}]})
        assert found.status == 507, "none"

    run(scenario, Settings(history=tmp_path / "history.jsonl"))


def test_forecasts_go_on_while_the_disk_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, sync = threading.Event(), os.fsync

    def silent(fd: int) -> None:
        answers.wait(30)
        sync(fd)

    async def scenario(service: Service) -> None:
        monkeypatch.setattr(history_file.os, "fsync", silent)
        told = await asyncio.gather(*(service.post("/v1/observations", ONE) for _ in range(4)))
        assert [item.status for item in told] == [507] * 4
        assert "a disk that says nothing for 0.2 s" in told[0].json["error"]
        start = time.perf_counter()
        assert {(await service.post("/v1/observations", ONE)).status for _ in range(20)} == {507}
        assert time.perf_counter() - start < 1, "refused at once"
        assert await runs(service, JOB) == 0
        answers.set()
        while not await runs(service, JOB):
            await asyncio.sleep(0.01)

    limits = Limits(store_seconds=0.2, in_flight=4)
    run(scenario, Settings(history=tmp_path / "history.jsonl", limits=limits))


def test_serve_tells_a_history_that_it_cannot_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text("something else\n", encoding="utf-8")
    assert serve.main(["--history", str(path)]) == 2
    assert "another kind of file" in capsys.readouterr().err
    path.write_bytes(encode_line("history", {"version": 2}))
    assert serve.main(["--history", str(path)]) == 2
    assert "found version 2: install a newer vramcast" in capsys.readouterr().err
    path.unlink()
    held = history_file.HistoryFile(path, 1)
    assert serve.main(["--history", str(path)]) == 2
    assert "another service" in capsys.readouterr().err
    held.close()


def test_the_round_trip_by_command_and_client(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(port=0, log_requests=False, history=tmp_path / "history.jsonl", device="t4")
    spec = json.dumps(MLP)
    with on_loopback(settings) as url:
        client = Client(url)
        assert client.classify(JOB).basis == "forecast"
        assert observe.main([spec, "--peak-mib", "3000", "--service", url]) == 0
        assert capsys.readouterr().out == "1 run on t4, 3000 MiB at most\n"
        estimate = client.classify(JOB)
        assert (estimate.basis, estimate.need_mib) == ("observed", pytest.approx(3150))
        assert client.observe(JOB, 2000).runs == 2
        assert client.place(JOB, [{"id": "0", "free_mib": 3100}]).refused == {"0": "needs 3150 MiB, 3100 are free"}
        assert place.main([spec, "--gpu", "0=3149", "--device", "t4", "--service", url]) == 1
        assert place.main([spec, "--gpu", "0=3150", "--device", "t4", "--service", url]) == 0
        capsys.readouterr()
        assert observe.main([spec, "--forget", "--service", url]) == 0
        assert capsys.readouterr().out == "nothing is known of it on t4\n"
        assert client.classify(JOB).basis == "forecast"
        assert client.forget(JOB).peak_mib is None
        for words in (
            ["--peak-mib", "nan"],
            ["--peak-mib", "0"],
            ["--peak-mib", "20000"],
            ["--peak-mib", "1", "--device", "x"],
        ):
            assert observe.main([spec, *words, "--service", url]) == 2
            assert capsys.readouterr().err.startswith("vramcast observe: expected")
