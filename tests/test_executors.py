"""Contract tests of all executors."""

import os
import pickle
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
from scripted_backend import Laned, Scripted, index_of, plain, spec

from vramcast.dataset_builder.executors import Executor, LocalExecutor, SerialExecutor
from vramcast.errors import UserError
from vramcast.jobs.spec import Spec
from vramcast.virtual_gpu.measurement import Status

pytestmark = pytest.mark.usefixtures("no_process_is_left")


@pytest.fixture
def backend() -> Scripted:
    return Scripted()


class ExecutorContract:
    """Tests that every executor passes."""

    most_in_flight: int

    def executor(self) -> Executor:
        raise NotImplementedError

    @pytest.mark.parametrize("number", [0, 1, 7, 500])
    def test_every_spec_has_one_outcome(self, backend: Any, number: int) -> None:
        outcomes = list(self.executor().run(backend, plain(number)))
        assert sorted(index_of(item) for item, _ in outcomes) == list(range(number))
        assert all(outcome.measurement.status is Status.OK for _, outcome in outcomes)

    def test_specs_are_read_lazily(self, backend: Any) -> None:
        taken = count()
        with closing(self.executor().run(backend, (spec(next(taken)) for _ in count()))) as outcomes:
            assert len(list(islice(outcomes, 20))) == 20
        assert next(taken) <= 20 + self.most_in_flight

    def test_no_spec_is_read_before_the_first_outcome_is_requested(self, backend: Any) -> None:
        taken = count()
        self.executor().run(backend, (spec(next(taken)) for _ in count()))
        assert next(taken) == 0

    def test_outcomes_come_with_the_same_spec_objects(self, backend: Any) -> None:
        specs = plain(5)
        assert {id(item) for item, _ in self.executor().run(backend, specs)} == {id(item) for item in specs}

    def test_equal_specs_each_have_an_outcome(self, backend: Any) -> None:
        assert len(list(self.executor().run(backend, [spec(0)] * 30))) == 30

    @pytest.mark.parametrize(
        ("do", "evidence"),
        [
            (("fail", "no\n  kernel"), "RuntimeError: no kernel"),
            (("leave",), "SystemExit: 3"),
            (("fail", ""), "RuntimeError"),
        ],
    )
    def test_an_exception_is_a_crash_of_its_spec(self, backend: Any, do: tuple[str, ...], evidence: str) -> None:
        specs = [spec(index, *do) if index == 3 else spec(index) for index in range(7)]
        outcomes = {index_of(item): outcome for item, outcome in self.executor().run(backend, specs)}
        assert outcomes[3].measurement.status is Status.CRASHED
        assert outcomes[3].measurement.evidence == evidence
        assert Counter(outcome.measurement.status for outcome in outcomes.values())[Status.OK] == 6

    def test_evidence_is_short(self, backend: Any) -> None:
        ((_, outcome),) = self.executor().run(backend, [spec(0, "fail", "long " * 1000)])
        assert len(outcome.measurement.evidence or "") == 500

    def test_a_user_error_ends_the_run(self, backend: Any) -> None:
        specs = (spec(index, "misuse" if index == 3 else "nothing") for index in count())
        with pytest.raises(UserError, match="expected a GPU, found none: add one"):
            list(self.executor().run(backend, specs))

    def test_an_error_of_the_specs_reaches_the_caller(self, backend: Any) -> None:
        def broken() -> Iterator[Spec]:
            yield from plain(3)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            list(self.executor().run(backend, broken()))

    def test_an_executor_can_be_used_again(self, backend: Any) -> None:
        executor = self.executor()
        assert [len(list(executor.run(backend, plain(3)))) for _ in range(2)] == [3, 3]


class TestSerialExecutor(ExecutorContract):
    most_in_flight = 0

    def executor(self) -> Executor:
        return SerialExecutor()


@pytest.mark.usefixtures("ray_cluster")
class TestRayExecutor(ExecutorContract):
    most_in_flight = 2 + 2  # under way, and finished while they were waited for

    def executor(self) -> Executor:
        from vramcast.dataset_builder.executors.on_ray import RayExecutor

        return RayExecutor(timeout_seconds=30)


class TestLocalExecutor(ExecutorContract):
    most_in_flight = 2 * (64 + 32)

    def executor(self) -> LocalExecutor:
        return LocalExecutor(workers=2, timeout_seconds=30)

    def test_outcomes_are_those_of_the_serial_executor(self, backend: Any) -> None:
        specs = [spec(index, "fail", "odd") if index % 5 == 0 else spec(index) for index in range(40)]
        there = {index_of(item): outcome for item, outcome in self.executor().run(backend, specs)}
        assert there == {index_of(item): outcome for item, outcome in SerialExecutor().run(backend, specs)}

    @pytest.mark.parametrize(("workers", "seconds"), [(0, None), (1, 0.0), (1, -1.0), (1, float("nan"))])
    def test_bad_settings_are_refused(self, workers: int, seconds: float | None) -> None:
        with pytest.raises(UserError):
            LocalExecutor(workers, seconds)

    def test_slow_specs_are_not_sent_ahead(self, backend: Any) -> None:
        taken = count()
        specs = (spec(next(taken), "sleep", 0.06) for _ in count())
        with closing(self.executor().run(backend, specs)) as outcomes:
            list(islice(outcomes, 8))
        assert next(taken) <= 8 + 2 + 2  # two at work, and two finished together

    def test_two_workers_work_at_the_same_time(self, backend: Any, tmp_path: Path) -> None:
        one, two = str(tmp_path / "one"), str(tmp_path / "two")
        outcomes = LocalExecutor(workers=2).run(backend, [spec(0, "meet", one, two), spec(1, "meet", two, one)])
        assert [outcome.measurement.status for _, outcome in outcomes] == ["ok", "ok"]

    def test_workers_use_a_core_each(self, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        before = dict(os.environ)
        ((_, outcome),) = self.executor().run(backend, [spec(0, "threads")])
        assert outcome.measurement.breakdown == {"threads": 1}
        assert dict(os.environ) == before

    def test_an_outcome_that_cannot_be_sent_is_a_crash(self, backend: Any) -> None:
        outcomes = dict(self.numbered(backend, [spec(0), spec(1, "unpicklable"), spec(2)]))
        assert [outcomes[index].measurement.status for index in range(3)] == ["ok", "crashed", "ok"]
        assert "lambda" in outcomes[1].measurement.evidence

    def test_a_spec_that_cannot_be_sent_ends_the_run(self, backend: Any) -> None:
        with pytest.raises((pickle.PicklingError, AttributeError)):
            list(self.executor().run(backend, [spec(0), spec(1, "nothing", lambda: 0), spec(2)]))

    def numbered(self, backend: Any, specs: Iterable[Spec]) -> Iterator[tuple[int, Any]]:
        return ((index_of(item), outcome) for item, outcome in self.executor().run(backend, specs))


class TestLanes:
    """A backend that needs devices has one worker for each, also after a worker's death."""

    def run(self, workers: int, folder: Path, specs: list[Spec]) -> tuple[Counter[Status], set[int]]:
        measurements = [outcome.measurement for _, outcome in LocalExecutor(workers, 30).run(Laned(), specs)]
        lanes = {item.breakdown["lane"] for item in measurements if "lane" in item.breakdown}
        return Counter(item.status for item in measurements), lanes

    def test_no_two_workers_share_a_device(self, tmp_path: Path) -> None:
        statuses, lanes = self.run(8, tmp_path, [spec(index, "alone", str(tmp_path)) for index in range(30)])
        assert statuses == {Status.OK: 30}
        assert lanes == {0, 1, 2}

    def test_a_device_of_a_dead_worker_is_used_again(self, tmp_path: Path) -> None:
        deaths = [spec(index, "end", 1, "gone") for index in range(3)]
        rest = [spec(index, "alone", str(tmp_path)) for index in range(3, 33)]
        statuses, lanes = self.run(3, tmp_path, [*deaths, *rest])
        assert statuses == {Status.OK: 30, Status.CRASHED: 3}
        assert lanes == {0, 1, 2}

    def test_fewer_workers_leave_devices_unused(self, tmp_path: Path) -> None:
        _, lanes = self.run(1, tmp_path, [spec(index, "alone", str(tmp_path)) for index in range(5)])
        assert lanes == {0}
