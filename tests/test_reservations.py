"""The effect of observations: what the service reserves for a job that ran before."""

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest
from observations import JOB, classify, observe, run, runs
from served import GPUMEMNET, MLP, SIMULATED, TABLE, Service

from vramcast.collocation.adapters.kubernetes import TOO_LITTLE_FREE
from vramcast.collocation.observed_peak import REPEAT_MARGIN
from vramcast.collocation.service import engine, kubernetes_routes
from vramcast.collocation.service.settings import Settings
from vramcast.collocation.service.worker_pool import LostError, OverloadedError, PoolError
from vramcast.errors import UserError

TRAINING = {"batch_size": 4, "optimizer": "SGD(momentum=0.9,lr=0.1)"}


def test_an_observation_changes_the_need_and_not_the_forecast() -> None:
    async def scenario(service: Service) -> None:
        before = await classify(service, JOB)
        assert (before["basis"], before["observed"], before["need_mib"]) == ("forecast", None, before["safe_mib"])
        assert await classify(service, JOB) == before, "cached"
        replies = await observe(service, JOB, 3000)
        assert replies == {"status": "ok", "device": "t4", "runs": 1, "peak_mib": 3000}
        after = await classify(service, JOB)
        assert (after["basis"], after["observed"]) == ("observed", {"runs": 1, "peak_mib": 3000})
        assert after["need_mib"] == pytest.approx(3000 * (1 + REPEAT_MARGIN)), "above the bound, too"
        forecast = {key: value for key, value in before.items() if key not in ("basis", "observed", "need_mib")}
        assert {**after, **forecast} == {**after, "seconds": before["seconds"]}
        assert await observe(service, JOB, 200) == {**replies, "runs": 2}, "the highest counts"
        assert await runs(service, JOB) == 2, "and the cached response is not valid any more"
        assert await classify(service, JOB) == await classify(service, JOB)

    run(scenario)


def test_a_low_observed_peak_lowers_the_need() -> None:
    async def scenario(service: Service) -> None:
        forecast = (await classify(service, JOB))["safe_mib"]
        await observe(service, JOB, forecast * 0.6)
        lower = forecast * 0.6 * (1 + REPEAT_MARGIN)
        assert (await classify(service, JOB))["need_mib"] == pytest.approx(lower, rel=1e-3), "rounded"

    run(scenario)


def test_an_observation_invalidates_only_the_cached_responses_with_its_job() -> None:
    async def scenario(service: Service) -> None:
        other = {**JOB, "spec": {**MLP, "training": {"batch_size": 16}}}
        await classify(service, other)
        both = {"jobs": [JOB, other]}
        await classify(service, both)
        batches = sum(service.engine.checkpoint.batches)
        await observe(service, JOB, 3000)
        await classify(service, other)
        assert sum(service.engine.checkpoint.batches) == batches
        assert [item["basis"] for item in (await classify(service, both))["answers"]] == ["observed", "forecast"]

    run(scenario)


def test_a_response_is_not_cached_if_a_job_was_observed_meanwhile() -> None:
    same = {**JOB, "spec": {**MLP, "training": {**MLP["training"], "optimizer": "Adam(lr=0.3)"}}}  # type: ignore[dict-item]

    async def scenario(service: Service) -> None:
        await classify(service, JOB)
        service.pool.hold = asyncio.Event()
        both = asyncio.create_task(classify(service, {"jobs": [JOB, same]}))
        while service.engine.batcher.answered < 2:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)  # the first has looked, the other waits for its trace
        await observe(service, JOB, 3000)
        service.pool.hold.set()
        assert [item["basis"] for item in (await both)["answers"]] == ["forecast", "observed"]
        again = await classify(service, {"jobs": [JOB, same]})
        assert [item["basis"] for item in again["answers"]] == ["observed", "observed"]

    run(scenario)


def test_different_spellings_are_the_same_job(tmp_path: Path) -> None:
    specs = tmp_path / "specs.jsonl"
    spelled_out = {
        "family": "mlp",
        "network": {"depth": 2, "output_features": 2, "input_features": 64, "arch": "pyramid", "activation": "relu"},
        "training": {"optimizer": "Adam()", "batch_size": 8, "loss": "cross_entropy", "accumulate": 1},
    }
    specs.write_text(json.dumps({"name": "mine", "spec": {**spelled_out, "training": MLP["training"]}}) + "\n")

    async def scenario(service: Service) -> None:
        await observe(service, {"spec": MLP}, 900)
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

    run(scenario, Settings(named_specs=specs))


def test_tables_and_features_have_a_history_too() -> None:
    named = {**TABLE, "layers": [{**layer, "name": "x", "functional": False} for layer in TABLE["layers"]]}  # type: ignore[union-attr]
    same = {**TRAINING, "optimizer": "SGD(lr=0.1, momentum=0.9)", "dtype": "fp32"}

    async def scenario(service: Service) -> None:
        table = {"table": TABLE, "training": TRAINING}
        await observe(service, table, 900)
        assert await runs(service, {"table": named, "training": same}) == 1
        assert await runs(service, {"table": {**TABLE, "input_elements": 11}, "training": same}) == 0
        features = {**table, "simulated": SIMULATED}
        assert await runs(service, {"features": features}) == 0, "two networks may have one table"
        await observe(service, {"features": features}, 700)
        assert await runs(service, {"features": {**features, "table": named, "training": same, "family": "mlp"}}) == 1
        assert await runs(service, {"features": {**features, "simulated": {**SIMULATED, "allocated_bytes": 1}}}) == 0

    run(scenario)


def test_the_device_of_an_observation_overrides_that_of_its_job() -> None:
    async def scenario(service: Service) -> None:
        assert (await observe(service, JOB, 900, device="v100_16gb"))["device"] == "v100_16gb"
        assert (await observe(service, JOB, 900))["device"] == "t4"
        assert (await observe(service, {"spec": MLP}, 900))["device"] == "a100_40gb"
        assert [await runs(service, {**JOB, "device": name}) for name in ("v100_16gb", "t4", "a100_40gb")] == [1, 1, 1]

    run(scenario)


def test_placements_reserve_the_observed_peak() -> None:
    async def scenario(service: Service) -> None:
        gpus = [{"id": str(free), "free_mib": free, "device": "t4"} for free in (3100, 3200)] + [
            {"id": "other", "free_mib": 3000}
        ]
        body = {"job": {"spec": MLP}, "gpus": gpus}
        before = (await service.post("/v1/placements", body)).json
        assert {item["basis"] for item in before["placements"]} == {"forecast"}
        await observe(service, JOB, 3000)
        after = (await service.post("/v1/placements", body)).json
        assert {item["gpu"]: item["basis"] for item in after["placements"]} == {"3200": "observed", "other": "forecast"}
        assert after["refused"][0]["reason"] == "needs 3150 MiB, 3100 are free"
        assert {name: item["basis"] for name, item in after["answers"].items()} == {
            "t4": "observed", "a100_40gb": "forecast"
        }  # fmt: skip

    run(scenario)


def test_the_extender_the_webhook_and_slurm_reserve_the_observed_peak() -> None:
    pod = {
        "metadata": {"name": "p", "annotations": {"vramcast/job": json.dumps(MLP)}},
        "spec": {"containers": [{"name": "c"}]},
    }
    gpu = json.dumps([{"id": "0", "free_mib": 3100, "total_mib": 40960}])
    args = {"Pod": pod, "Nodes": {"items": [{"metadata": {"name": "n", "annotations": {"vramcast/gpus": gpu}}}]}}

    async def patched(service: Service) -> dict[str, Any]:
        response = await service.post("/k8s/mutate", {"request": {"uid": "u", "object": pod}})
        patch = json.loads(base64.b64decode(response.json["response"]["patch"]))
        return {step["path"].rpartition("/")[2]: step["value"] for step in patch}

    async def scenario(service: Service) -> None:
        assert (await service.post("/k8s/filter", args)).json["FailedNodes"] == {}
        assert (await patched(service))["vramcast~1basis"] == "forecast"
        await observe(service, {"spec": MLP}, 3000)
        assert (await service.post("/k8s/filter", args)).json["FailedNodes"] == {"n": TOO_LITTLE_FREE}
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
            await observe(service, {"spec": MLP}, 3000, device=device)
        service.pool.error = error
        slurm = await service.post("/v1/slurm", json.dumps(MLP).encode(), content_type="text/plain")
        assert slurm.body == b"need_mib=3150\nshards=4\ngpu_shards=40\ndevice=a100_40gb\nbasis=observed\n"
        assert (await service.post("/k8s/filter", args)).json["FailedNodes"] == {"n": TOO_LITTLE_FREE}
        review = await service.post("/k8s/mutate", {"request": {"uid": "u", "object": pod}})
        assert b"3150" in base64.b64decode(review.json["response"]["patch"])
        assert service.pool.asked == [], "nothing was traced"
        placed = (await service.post("/v1/placements", body)).json
        assert [(item["gpu"], item["need_mib"], item["basis"]) for item in placed["placements"]] == [
            ("0", 3150.0, "observed"), ("1", 3150.0, "observed")
        ]  # fmt: skip
        assert placed["answers"] == {}
        assert (await service.post("/v1/classify", {"spec": MLP})).status in (422, 503), "it is a forecast"
        service.pool.error = None
        if not isinstance(error, UserError) or isinstance(error, LostError):
            placed = (await service.post("/v1/placements", body)).json
            assert set(placed["answers"]) == {"t4", "a100_40gb"}, "and the reply without forecasts was not cached"
        assert (await service.post("/v1/observations", {"job": {"spec": MLP}, "forget": True})).status == 200
        service.pool.error = error
        other = {**body, "gpus": [*body["gpus"], {"id": "2", "free_mib": 3200, "device": "l4"}]}
        assert (await service.post("/v1/placements", other)).status in (422, 503), "observed on only one of them"

    run(scenario)


def test_a_table_is_hashed_once_for_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[Any] = []
    id_of_table = engine.id_of_table
    monkeypatch.setattr(engine, "id_of_table", lambda job: hashed.append(job) or id_of_table(job))  # type: ignore[func-returns-value]

    async def scenario(service: Service) -> None:
        gpus = [{"id": name, "free_mib": 9000, "device": name} for name in ("t4", "l4", "v100_16gb")]
        body = {"job": {"table": TABLE, "training": TRAINING}, "gpus": gpus}
        assert len((await service.post("/v1/placements", body)).json["placements"]) == 3
        assert len(hashed) == 1

    run(scenario)


def test_a_job_that_ran_on_a_device_fits_on_it() -> None:
    tight = {"spec": {**MLP, "training": {"batch_size": 2**24}}, "device": "t4"}

    async def scenario(service: Service) -> None:
        assert (await classify(service, tight))["verdict"] == "tight"
        whole = (await classify(service, tight))["capacity_mib"]
        await observe(service, tight, whole - 10)
        assert (await classify(service, tight))["need_mib"] == whole
        await observe(service, tight, 15360)
        assert (await classify(service, tight))["need_mib"] == 15360, (
            "more than the profile leaves, but that is what it took"
        )

    run(scenario)


def test_a_tight_job_gets_the_whole_device_until_it_is_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"spec": {**MLP, "training": {"batch_size": 2**24}}, "device": "t4"}
    gpus = [{"id": name, "free_mib": 15360, "total_mib": 23034, "device": name} for name in ("t4", "l4")]
    logged: list[dict[str, Any]] = []
    monkeypatch.setattr(kubernetes_routes, "event", lambda _, **fields: logged.append(fields))

    async def reserve(service: Service) -> tuple[str, str]:
        slurm = await service.post("/v1/slurm", json.dumps(job).encode(), content_type="text/plain")
        nodes = [
            {"metadata": {"name": gpu["id"], "annotations": {"vramcast/gpus": json.dumps([{**gpu, "free_mib": 1}])}}}
            for gpu in gpus
        ]
        pod = {"metadata": {"annotations": {"vramcast/job": json.dumps(job)}}}
        response = await service.post("/k8s/filter", {"Pod": pod, "Nodes": {"items": nodes}})
        assert response.json["FailedNodes"] == {"t4": TOO_LITTLE_FREE, "l4": TOO_LITTLE_FREE}
        assert logged[-1]["node"] == "t4", "the figures are in the log"
        return slurm.body.decode().splitlines()[0], logged[-1]["reason"]

    async def scenario(service: Service) -> None:
        response = await classify(service, job)
        whole, safe = response["capacity_mib"], response["safe_mib"]
        assert response["verdict"] == "tight"
        assert safe > whole
        assert await reserve(service) == (f"need_mib={whole:.0f}", f"needs {whole:.0f} MiB, 1 are free")
        await observe(service, job, 9000)
        # beside a card that it was not seen on, with its forecast; by Slurm without
        assert await reserve(service) == ("need_mib=9450", "needs 9450 MiB, 1 are free")

    run(scenario)
