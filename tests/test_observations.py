"""Observations over HTTP: stored, refused, removed and forgotten."""

import asyncio
import json
import re
import resource
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from observations import JOB, classify, observe, run, runs
from served import MLP, SIMULATED, TABLE, Service, on_loopback

from vramcast.collocation.client import Client
from vramcast.collocation.service import history
from vramcast.collocation.service.database import StorageDownError
from vramcast.collocation.service.settings import Limits, Settings
from vramcast.collocation.service.storage import Change, Storage
from vramcast.commands.collocation import observe_command, place_command, serve_command
from vramcast.dataset_builder.store.lines import encode_line

ONE = {"job": JOB, "peak_mib": 900}


def test_an_observation_of_an_impossible_job_is_refused() -> None:
    async def scenario(service: Service) -> None:
        for job in (
            {"spec": {**MLP, "training": {"batch_size": 8, "optimizer": "Adan"}}},
            {"spec": {**MLP, "training": {"batch_size": 8, "last_batch_size": 9}}},
            {"spec": {**MLP, "network": {**MLP["network"], "depth": 3000}}},  # type: ignore[dict-item]
            {"table": TABLE, "training": {"batch_size": 8, "optimizer": "Adan"}},
            {"features": {"table": TABLE, "training": {"batch_size": 8, "optimizer": "Adan"}, "simulated": SIMULATED}},
        ):
            service.pool.asked.clear()
            replies = await service.post("/v1/observations", {"job": job, "peak_mib": 900})
            assert service.pool.asked == [], "that took no trace"
            classified = await service.post("/v1/classify", job)
            assert (replies.status, replies.json["error"]) == (422, classified.json["error"]), job
        assert len(service.engine.history) == 0

    run(scenario)


def test_a_bad_observation_does_not_fail_the_others_of_a_request() -> None:
    async def scenario(service: Service) -> None:
        one = {"job": JOB, "peak_mib": 900}
        response = await service.post(
            "/v1/observations",
            {"observations": [one, {**one, "peak_mib": 15361}, {"job": {"name": "x"}, "peak_mib": 1}, one]},
        )
        assert [item["status"] for item in response.json["answers"]] == ["ok", "error", "error", "ok"]
        assert "at most 15360, the memory of t4, found 15361" in response.json["answers"][1]["error"]
        assert await runs(service, JOB) == 2
        text = (await service.get("/metrics")).body.decode()
        assert "vramcast_remembered_jobs 1.0" in text
        assert 'vramcast_observations_total{outcome="remembered"} 2.0' in text

    run(scenario)


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
    "more than the device": {**ONE, "peak_mib": 15360.5},
    "less than CUDA": {**ONE, "peak_mib": 141},
    "to forget and to remember": {**ONE, "forget": True},
    "not to forget": {"job": JOB, "forget": False},
    "to forget several": {"observations": [ONE], "forget": True},
    "huge": {**ONE, "peak_mib": 1e308},
    "a huge number": b'{"job": {"name": "x"}, "peak_mib": ' + b"9" * 5000 + b"}",
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
def test_a_bad_observation_is_refused_with_a_sentence(body: Any) -> None:
    async def scenario(service: Service) -> None:
        response = await service.post("/v1/observations", body)
        assert response.status in (400, 422), response.body
        assert response.json["error"].startswith("expected")
        assert len(service.engine.history) == 0

    run(scenario)


def test_a_peak_in_another_unit_is_refused_with_an_explanation() -> None:
    async def scenario(service: Service) -> None:
        response = await service.post("/v1/observations", {**ONE, "peak_mib": 15})  # GiB
        assert response.status == 422
        assert response.json["error"] == (
            "expected peak_mib above 141, which CUDA alone takes on t4, found 15: "
            "report the memory of the whole process as nvidia-smi shows it, in MiB"
        )
        await observe(service, JOB, 180.5)

    run(scenario)


def test_a_wrong_peak_can_be_removed(tmp_path: Path) -> None:
    settings = Settings(history=tmp_path / "history.db")
    forget = {"job": JOB, "forget": True}

    async def scenario(service: Service) -> None:
        before = await classify(service, JOB)
        await observe(service, JOB, 9000)
        await observe(service, JOB, 900, device="v100_16gb")
        assert (await classify(service, JOB))["basis"] == "observed"
        response = await service.post("/v1/observations", forget)
        assert response.json == {"status": "ok", "device": "t4", "runs": 0, "peak_mib": None}
        assert await classify(service, JOB) == {**before, "seconds": (await classify(service, JOB))["seconds"]}
        assert await runs(service, {**JOB, "device": "v100_16gb"}) == 1, "which is another job"
        replies = [forget, {**ONE, "peak_mib": 500}, {"job": {"name": "x"}, "forget": True}, forget]
        several = await service.post("/v1/observations", {"observations": replies})
        assert [item.get("runs") for item in several.json["answers"]] == [0, 1, None, 0], "in their order"
        assert 'outcome="forgotten"} 3.0' in (await service.get("/metrics")).body.decode()

    async def again(service: Service) -> None:
        assert await runs(service, JOB) == 0
        assert await observe(service, JOB, 900) == {"status": "ok", "device": "t4", "runs": 1, "peak_mib": 900}

    run(scenario, settings)
    run(again, settings)


def test_observations_need_the_token() -> None:
    async def scenario(service: Service) -> None:
        assert (await service.post("/v1/observations", ONE)).status == 401
        assert (await service.post("/v1/observations", ONE, authorization="Bearer secret")).status == 200

    run(scenario, Settings(token="secret"))


def test_observations_survive_a_restart_only_with_a_file(tmp_path: Path) -> None:
    stored = Settings(history=tmp_path / "new" / "history.db")
    for settings, expected in ((Settings(), [0, 0]), (stored, [0, 1])):
        seen = []

        async def scenario(service: Service, seen: list[int] = seen) -> None:
            seen.append(await runs(service, JOB))
            await observe(service, JOB, 900)

        run(scenario, settings)
        run(scenario, settings)
        assert seen == expected


def test_the_jobs_observed_longest_ago_are_forgotten_first() -> None:
    def job(batch_size: int) -> dict[str, Any]:
        return {**JOB, "spec": {**MLP, "training": {"batch_size": batch_size}}}

    async def scenario(service: Service) -> None:
        for size in (1, 2, 1, 3):
            await observe(service, job(size), 900)
        assert [await runs(service, job(size)) for size in (3, 2, 1)] == [1, 0, 2]
        assert len(service.engine.history) == 2

    run(scenario, Settings(limits=Limits(history_jobs=2)))


def test_concurrent_observations_are_all_counted_and_share_a_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(history=tmp_path / "history.db", limits=Limits(store_seconds=30))
    commits, change = [], Storage.change

    def counted(self: Storage, changes: Sequence[Change]) -> Any:
        commits.append(len(changes))
        return change(self, changes)

    async def scenario(service: Service) -> None:
        monkeypatch.setattr(Storage, "change", counted)
        replies = await asyncio.gather(*(observe(service, JOB, 200 + index) for index in range(200)))
        monkeypatch.undo()
        assert sorted(item["runs"] for item in replies) == list(range(1, 201))

    async def again(service: Service) -> None:
        assert (await classify(service, JOB))["observed"] == {"runs": 200, "peak_mib": 399}

    run(scenario, settings)
    assert sum(commits) == 200
    assert len(commits) < 100
    run(again, settings)


@contextmanager
def full_disk(size_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_an_error_and_loses_nothing(tmp_path: Path) -> None:
    settings = Settings(history=tmp_path / "history.db")

    async def scenario(service: Service) -> None:
        await observe(service, JOB, 900)
        before = await classify(service, JOB)
        with full_disk((tmp_path / "history.db-wal").stat().st_size):
            for body in ({**ONE, "peak_mib": 5000}, {"observations": [ONE, ONE]}):
                response = await service.post("/v1/observations", body)
                assert response.status == 507
                assert "expected to store the observation, found: disk I/O error" in response.json["error"]
                assert str(tmp_path) not in response.json["error"]
            assert await classify(service, JOB) == before
        assert await observe(service, JOB, 800) == {"status": "ok", "device": "t4", "runs": 2, "peak_mib": 900}
        text = (await service.get("/metrics")).body.decode()
        assert 'vramcast_observations_total{outcome="not stored"} 3.0' in text

    async def again(service: Service) -> None:
        assert (await classify(service, JOB))["observed"] == {"runs": 2, "peak_mib": 900}

    run(scenario, settings)
    run(again, settings)


def test_each_observation_of_a_request_says_if_it_was_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_LARGEST_BATCH", 1)

    async def scenario(service: Service) -> None:
        change, stored = Storage.change, []

        def once(self: Storage, changes: Sequence[Change]) -> Any:
            stored.append(changes)
            if len(stored) > 1:
                raise StorageDownError("no room")
            return change(self, changes)

        monkeypatch.setattr(Storage, "change", once)
        response = await service.post("/v1/observations", {"observations": [ONE, ONE, {**ONE, "peak_mib": 1}]})
        assert response.status == 200
        assert [item["status"] for item in response.json["answers"]] == ["ok", "error", "error"]
        assert "expected to store the observation, found: no room" in response.json["answers"][1]["error"]
        response = await service.post("/v1/observations", {"observations": [ONE, {**ONE, "peak_mib": 1}]})
        assert response.status == 507, "none"

    run(scenario, Settings(history=tmp_path / "history.db"))


def test_forecasts_are_answered_while_the_disk_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, change = threading.Event(), Storage.change

    def silent(self: Storage, changes: Sequence[Change]) -> Any:
        answers.wait(30)
        return change(self, changes)

    async def scenario(service: Service) -> None:
        monkeypatch.setattr(Storage, "change", silent)
        replies = await asyncio.gather(*(service.post("/v1/observations", ONE) for _ in range(4)))
        assert [item.status for item in replies] == [507] * 4
        assert "a disk that does not answer for 0.2 s" in replies[0].json["error"]
        start = time.perf_counter()
        assert {(await service.post("/v1/observations", ONE)).status for _ in range(20)} == {507}
        assert time.perf_counter() - start < 1, "refused at once"
        assert await runs(service, JOB) == 0
        answers.set()
        while not await runs(service, JOB):
            await asyncio.sleep(0.01)

    limits = Limits(store_seconds=0.2, in_flight=4)
    run(scenario, Settings(history=tmp_path / "history.db", limits=limits))


def test_serve_refuses_a_history_file_that_it_cannot_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "history.db"
    path.write_text("something else\n", encoding="utf-8")
    assert serve_command.main(["--history", str(path)]) == 2
    assert "another kind of file" in capsys.readouterr().err
    path.write_bytes(encode_line("history", {"version": 1}))
    assert serve_command.main(["--history", str(path)]) == 2
    assert f"move it, and import it by --import-history {path}" in capsys.readouterr().err
    path.unlink()
    file = Storage(path, 1)
    assert serve_command.main(["--history", str(path)]) == 2
    assert "another service" in capsys.readouterr().err
    file.close()


def test_the_command_and_the_client_report_and_remove_observations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(port=0, log_requests=False, history=tmp_path / "history.db", device="t4")
    spec = json.dumps(MLP)
    with on_loopback(settings) as url:
        client = Client(url)
        assert client.classify(JOB).basis == "forecast"
        assert observe_command.main([spec, "--peak-mib", "3000", "--service", url]) == 0
        assert capsys.readouterr().out == "1 run on t4, 3000 MiB at most\n"
        estimate = client.classify(JOB)
        assert (estimate.basis, estimate.need_mib) == ("observed", pytest.approx(3150))
        assert client.observe(JOB, 2000).runs == 2
        assert client.place(JOB, [{"id": "0", "free_mib": 3100}]).refused == {"0": "needs 3150 MiB, 3100 are free"}
        assert place_command.main([spec, "--gpu", "0=3149", "--device", "t4", "--service", url]) == 1
        assert place_command.main([spec, "--gpu", "0=3150", "--device", "t4", "--service", url]) == 0
        capsys.readouterr()
        assert observe_command.main([spec, "--forget", "--service", url]) == 0
        assert capsys.readouterr().out == "no observations on t4\n"
        assert client.classify(JOB).basis == "forecast"
        assert client.forget(JOB).peak_mib is None
        for words in (
            ["--peak-mib", "nan"],
            ["--peak-mib", "0"],
            ["--peak-mib", "20000"],
            ["--peak-mib", "1", "--device", "x"],
        ):
            assert observe_command.main([spec, *words, "--service", url]) == 2
            assert capsys.readouterr().err.startswith("vramcast observe: expected")


def test_metrics_compare_runs_with_their_forecasts() -> None:
    async def scenario(service: Service) -> None:
        await observe(service, JOB, 900)  # without a forecast
        answer = await classify(service, JOB)
        estimate_mib, safe_mib = answer["estimate_mib"], answer["safe_mib"]
        for peak_mib in (estimate_mib + 1, safe_mib - 1, safe_mib + 1):
            await observe(service, JOB, round(peak_mib, 3))
        text = (await service.get("/metrics")).body.decode()
        for forecast, count in (("none", 1), ("safe", 2), ("too low", 1)):
            assert f'vramcast_forecast_runs_total{{device="t4",forecast="{forecast}"}} {count}.0' in text
        assert 'vramcast_peak_to_estimate_ratio_bucket{device="t4",le="1.05"} 1.0' in text
        assert 'vramcast_peak_to_estimate_ratio_count{device="t4"} 3.0' in text

    run(scenario)


def test_the_dashboard_shows_metrics_that_exist() -> None:
    path = Path(__file__).parents[1] / "deploy" / "grafana" / "vramcast.json"
    queries = [target["expr"] for panel in json.loads(path.read_text("utf-8"))["panels"] for target in panel["targets"]]
    names = {name for query in queries for name in re.findall(r"vramcast_[a-z_]+", query)}

    async def scenario(service: Service) -> None:
        await classify(service, JOB)
        await observe(service, JOB, 900)
        text = (await service.get("/metrics")).body.decode()
        assert len(names) > 8
        assert {name for name in names if f"\n{name}" not in text} == set()

    run(scenario)
