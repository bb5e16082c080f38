"""Every executor keeps one contract; worker processes owe more, as they can hang and die."""

import contextlib
import importlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import count, islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dataset_builder.errors import UserError
from dataset_builder.executors import Executor, LocalExecutor, SerialExecutor, WorkerError
from dataset_builder.schema import Spec, Status, TrainingSetup

# A module of its own, for workers must import the backend by name, and cannot import a test.
BACKEND = '''
import ctypes, os, signal, subprocess, sys, time
from pathlib import Path

from dataset_builder.errors import UserError
from dataset_builder.measure._base import Backend, Outcome
from dataset_builder.schema import Measurement, StaticEstimate, Status


class Scripted(Backend):
    """Does what the spec says."""

    name = "scripted"
    origin = "static"

    def measure(self, spec):
        detail = getattr(self, spec.network["do"])(*spec.network["with"]) or {}
        static = StaticEstimate(spec.network["index"], 2, 3, 4)
        return Outcome(static, Measurement(status=Status.OK, allocated_bytes=7, breakdown=detail))

    def nothing(self):
        pass

    def pid(self):
        return {"pid": os.getpid()}

    def threads(self):
        return {"threads": int(os.environ["OMP_NUM_THREADS"])}

    def sleep(self, seconds):
        time.sleep(seconds)

    def fail(self, message):
        raise RuntimeError(message)

    def leave(self):
        sys.exit(3)

    def misuse(self):
        raise UserError("expected a card, found none: add one")

    def unpicklable(self):
        return {"bytes": lambda: 0}

    def end(self, code, words):
        print(words, file=sys.stderr)
        os._exit(code)

    def kill(self, number):
        os.kill(os.getpid(), number)
        time.sleep(60)

    def deafen(self):
        os.closerange(3, 64)
        time.sleep(60)

    def hang(self, file):
        child = subprocess.Popen(["sleep", "60"])
        temporary = Path(file).with_suffix(".part")
        temporary.write_text(f"{os.getpid()} {child.pid}")
        temporary.rename(file)
        time.sleep(60)

    def hang_with_lock(self, file):
        Path(file).write_text(str(os.getpid()))
        ctypes.PyDLL(None).sleep(60)


class DiesOnLoad(Scripted):
    def __setstate__(self, state):
        print("no such library", file=sys.stderr)
        os._exit(3)

    def __getstate__(self):
        return {"any": 1}


class RefusesOnLoad(DiesOnLoad):
    def __setstate__(self, state):
        raise UserError("expected a driver, found none: install one")
'''


def spec(index: int, do: str = "nothing", *args: Any) -> Spec:
    return Spec("mlp", {"index": index, "do": do, "with": list(args)}, TrainingSetup(batch_size=1))


def plain(number: int) -> list[Spec]:
    return [spec(index) for index in range(number)]


def index_of(item: Spec) -> int:
    return int(item.network["index"])


def alive(pid: int) -> bool:
    """True for a process that runs; one that has ended and was not waited for does not."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def wait_until(condition: Any, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    folder = tmp_path_factory.mktemp("backend")
    (folder / "scripted_backend.py").write_text(BACKEND)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("scripted_backend")
    sys.path.remove(str(folder))


@pytest.fixture
def backend(module: ModuleType) -> Any:
    return module.Scripted()


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


class ExecutorContract:
    """What holds for every executor."""

    most_in_flight: int

    def executor(self) -> Executor:
        raise NotImplementedError

    @pytest.mark.parametrize("number", [0, 1, 7, 500])
    def test_every_spec_has_one_outcome(self, backend: Any, number: int) -> None:
        outcomes = list(self.executor().run(backend, plain(number)))
        assert sorted(index_of(item) for item, _ in outcomes) == list(range(number))
        for item, outcome in outcomes:
            assert outcome.static and outcome.static.parameter_bytes == index_of(item)
            assert outcome.measurement.status is Status.OK

    def test_specs_are_taken_lazily(self, backend: Any) -> None:
        taken = count()
        with closing(self.executor().run(backend, (spec(next(taken)) for _ in count()))) as outcomes:
            assert len(list(islice(outcomes, 20))) == 20
        assert next(taken) <= 20 + self.most_in_flight

    def test_nothing_is_taken_before_the_first_outcome_is_asked_for(self, backend: Any) -> None:
        taken = count()
        self.executor().run(backend, (spec(next(taken)) for _ in count()))
        assert next(taken) == 0

    def test_the_spec_that_comes_back_is_the_spec_that_went_in(self, backend: Any) -> None:
        specs = plain(5)
        assert {id(item) for item, _ in self.executor().run(backend, specs)} == {id(item) for item in specs}

    def test_equal_specs_have_an_outcome_each(self, backend: Any) -> None:
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
        assert outcomes[3].static is None
        assert Counter(outcome.measurement.status for outcome in outcomes.values())[Status.OK] == 6

    def test_evidence_is_short(self, backend: Any) -> None:
        ((_, outcome),) = self.executor().run(backend, [spec(0, "fail", "long " * 1000)])
        assert len(outcome.measurement.evidence or "") == 500

    def test_a_user_error_ends_the_run(self, backend: Any) -> None:
        specs = (spec(index, "misuse" if index == 3 else "nothing") for index in count())
        with pytest.raises(UserError, match="expected a card, found none: add one"):
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

    def test_two_workers_take_half_the_time(self, backend: Any) -> None:
        with closing(self.executor().run(backend, (spec(index, "sleep", 0.1) for index in count()))) as outcomes:
            list(islice(outcomes, 4))  # both are up
            start = time.monotonic()
            list(islice(outcomes, 16))
            assert time.monotonic() - start < 1.3

    def test_workers_use_a_core_each(self, backend: Any) -> None:
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


class TestDeathOfWorkers:
    """A worker that dies takes one spec with it."""

    @pytest.mark.parametrize(
        ("do", "evidence"),
        [
            (("end", 7, "cannot go on"), "worker ended with exit code 7: cannot go on"),
            (("end", 0, ""), "worker ended with exit code 0"),
            (("kill", signal.SIGKILL), "worker killed by SIGKILL"),
            (("kill", signal.SIGSEGV), "worker killed by SIGSEGV"),
            (("kill", signal.SIGRTMIN + 1), f"worker killed by signal {signal.SIGRTMIN + 1}"),
        ],
    )
    def test_only_the_spec_at_work_crashes(self, backend: Any, do: tuple[Any, ...], evidence: str) -> None:
        bad = {0, 150, 151}
        specs = [spec(index, *do) if index in bad else spec(index) for index in range(200)]
        outcomes = [(index_of(item), outcome.measurement) for item, outcome in LocalExecutor(2).run(backend, specs)]
        assert sorted(index for index, _ in outcomes) == list(range(200))
        assert {index for index, measured in outcomes if measured.status is Status.CRASHED} == bad
        assert all((measured.evidence or "").startswith(evidence) for index, measured in outcomes if index in bad)
        assert all(measured.status is Status.OK for index, measured in outcomes if index not in bad)

    def test_a_worker_that_cuts_its_connection_is_ended(self, backend: Any) -> None:
        start = time.monotonic()
        ((_, outcome),) = LocalExecutor(1).run(backend, [spec(0, "deafen")])
        assert outcome.measurement.status is Status.CRASHED
        assert time.monotonic() - start < 5

    def test_a_few_specs_that_all_die_are_outcomes(self, backend: Any) -> None:
        specs = [spec(index, "kill", signal.SIGKILL) for index in range(4)]
        outcomes = list(LocalExecutor(2).run(backend, specs))
        assert [outcome.measurement.status for _, outcome in outcomes] == ["crashed"] * 4

    def test_death_on_every_spec_ends_the_run(self, backend: Any) -> None:
        outcomes = LocalExecutor(2).run(backend, (spec(index, "end", 4, "bad card") for index in count()))
        with pytest.raises(WorkerError, match=r"died on their first spec .*exit code 4: bad card"):
            list(outcomes)

    def test_an_idle_worker_may_die(self, backend: Any) -> None:
        with closing(LocalExecutor(1).run(backend, (spec(index, "pid") for index in count()))) as outcomes:
            pid = next(outcomes)[1].measurement.breakdown["pid"]
            os.kill(pid, signal.SIGKILL)
            found = [outcome.measurement for _, outcome in islice(outcomes, 300)]
        assert sum(measured.status is Status.CRASHED for measured in found) <= 1
        assert found[-1].breakdown["pid"] != pid


class TestStart:
    """A worker that cannot start ends the run, soon and with the reason."""

    def test_a_backend_that_workers_cannot_import(self, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        here = ModuleType("only_here")
        here.Hidden = type("Hidden", (type(backend),), {"__module__": "only_here"})  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "only_here", here)
        with pytest.raises(WorkerError, match="ModuleNotFoundError: No module named 'only_here'"):
            list(LocalExecutor(2).run(here.Hidden(), plain(3)))

    def test_a_backend_that_kills_its_process(self, module: ModuleType) -> None:
        start = time.monotonic()
        with pytest.raises(WorkerError, match=r"died while they started .*exit code 3: no such library"):
            list(LocalExecutor(2).run(module.DiesOnLoad(), map(spec, count())))
        assert time.monotonic() - start < 10

    def test_a_backend_that_refuses(self, module: ModuleType) -> None:
        with pytest.raises(UserError, match="expected a driver"):
            list(LocalExecutor(2).run(module.RefusesOnLoad(), plain(3)))


class TestTimeLimit:
    def test_a_hanging_spec_is_ended_with_its_children(self, backend: Any, tmp_path: Path) -> None:
        file = tmp_path / "pids"
        specs = [spec(0), spec(1, "hang", str(file)), *(spec(index) for index in range(2, 50))]
        start = time.monotonic()
        outcomes = {index_of(item): outcome for item, outcome in LocalExecutor(2, 1.0).run(backend, specs)}
        assert time.monotonic() - start < 5
        assert outcomes[1].measurement.status is Status.TIMEOUT
        assert outcomes[1].measurement.evidence == "no result after 1 s"
        assert len(outcomes) == 50
        assert all(outcome.measurement.status is Status.OK for index, outcome in outcomes.items() if index != 1)
        pids = [int(text) for text in file.read_text().split()]
        assert len(pids) == 2
        assert wait_until(lambda: not any(map(alive, pids)), 2)

    def test_the_limit_is_that_of_one_spec(self, backend: Any) -> None:
        specs = [spec(index, "sleep", 0.15) for index in range(8)]
        found = [outcome.measurement.status for _, outcome in LocalExecutor(1, 0.9).run(backend, specs)]
        assert found == ["ok"] * 8

    def test_a_slow_caller_makes_no_spec_late(self, backend: Any) -> None:
        found = []
        for _, outcome in LocalExecutor(2, 0.6).run(backend, plain(400)):
            found.append(outcome.measurement.status)
            if len(found) in (1, 200):
                time.sleep(0.9)
        assert found == ["ok"] * 400


class TestEnd:
    """Whatever ends the run, no process outlives it."""

    def test_closing_ends_the_workers(self, backend: Any, tmp_path: Path) -> None:
        files = [tmp_path / "one", tmp_path / "two"]
        specs = [spec(0), *(spec(index, "hang", str(file)) for index, file in enumerate(files, 1))]
        outcomes = LocalExecutor(2).run(backend, specs)
        next(outcomes)
        assert wait_until(files[0].exists, 5)
        start = time.monotonic()
        outcomes.close()
        assert time.monotonic() - start < 2
        pids = [int(text) for file in files if file.exists() for text in file.read_text().split()]
        assert wait_until(lambda: not any(map(alive, pids)), 2)

    def test_an_exception_of_the_caller_ends_the_workers(self, backend: Any) -> None:
        pids = set()

        def use() -> None:
            for _, outcome in LocalExecutor(2).run(backend, (spec(index, "pid") for index in count())):
                pids.add(outcome.measurement.breakdown["pid"])
                if len(pids) == 2:
                    raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            use()
        assert wait_until(lambda: not any(map(alive, pids)), 2)

    def test_logs_are_not_left_behind(self, backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        list(LocalExecutor(2).run(backend, [spec(0, "end", 1, "words"), *plain(20)]))
        assert not list(tmp_path.glob("worker-*"))

    def test_workers_outlive_the_thread_that_started_them(self, backend: Any) -> None:
        outcomes = LocalExecutor(1).run(backend, (spec(index, "pid") for index in count()))
        first: list[Any] = []
        thread = threading.Thread(target=lambda: first.append(next(outcomes)))
        thread.start()
        thread.join()
        time.sleep(1.5)
        with closing(outcomes):
            found = [outcome.measurement.breakdown["pid"] for _, outcome in islice(outcomes, 200)]
        assert set(found) == {first[0][1].measurement.breakdown["pid"]}


PARENT = """
import sys, time
from itertools import count
from scripted_backend import Scripted
from dataset_builder.executors import LocalExecutor
from dataset_builder.schema import Spec, TrainingSetup

def spec(do, *args):
    return Spec("mlp", {"index": 0, "do": do, "with": list(args)}, TrainingSetup(batch_size=1))

class Here(Scripted):
    pass

if __name__ == "__main__":
"""


class TestParent:
    """The parent as a program with a backend of its own, ended in several ways."""

    def start(self, module: ModuleType, folder: Path, body: str) -> "subprocess.Popen[str]":
        script = folder / "parent.py"
        script.write_text(PARENT + "\n".join(f"    {line}" for line in body.splitlines()))
        path = os.pathsep.join([str(Path(module.__file__ or "").parent), *filter(None, sys.path)])
        return subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def hanging(self, module: ModuleType, folder: Path) -> tuple["subprocess.Popen[str]", list[int]]:
        """A parent with two workers that hang, and the process ids of all but the parent."""
        body = 'specs = [spec("hang", sys.argv[1] + "/one"), spec("hang_with_lock", sys.argv[1] + "/two")]\n'
        parent = self.start(module, folder, body + "list(LocalExecutor(2).run(Here(), specs))")
        files = [folder / "one", folder / "two"]
        assert wait_until(lambda: all(file.exists() and file.read_text() for file in files), 10)
        pids = [int(text) for file in files for text in file.read_text().split()]
        assert len(pids) == 3
        assert all(map(alive, pids))
        return parent, pids

    def test_killed(self, module: ModuleType, tmp_path: Path) -> None:
        parent, pids = self.hanging(module, tmp_path)
        parent.kill()
        parent.communicate(timeout=10)
        assert wait_until(lambda: not any(map(alive, pids)), 5)

    def test_interrupted(self, module: ModuleType, tmp_path: Path) -> None:
        parent, pids = self.hanging(module, tmp_path)
        os.killpg(parent.pid, signal.SIGINT)
        _, errors = parent.communicate(timeout=5)
        assert errors.count("Traceback") == errors.count("KeyboardInterrupt") == 1
        assert wait_until(lambda: not any(map(alive, pids)), 2)

    @pytest.mark.parametrize("delay", [0.05, 0.1, 0.15, 0.2])
    def test_interrupted_while_workers_start(self, module: ModuleType, tmp_path: Path, delay: float) -> None:
        body = 'print("up", flush=True)\nlist(LocalExecutor(4).run(Here(), (spec("nothing") for _ in count())))'
        parent = self.start(module, tmp_path, body)
        assert parent.stdout
        assert parent.stdout.readline() == "up\n"
        time.sleep(delay)
        os.killpg(parent.pid, signal.SIGINT)
        _, errors = parent.communicate(timeout=5)
        assert errors.count("Traceback") == errors.count("KeyboardInterrupt") == 1, errors

    def test_ended_with_outcomes_to_come(self, module: ModuleType, tmp_path: Path) -> None:
        body = 'outcomes = LocalExecutor(2).run(Here(), (spec("pid") for _ in count()))\n'
        body += 'print(next(outcomes)[1].measurement.breakdown["pid"])'
        parent = self.start(module, tmp_path, body)
        printed, errors = parent.communicate(timeout=10)
        assert not errors
        assert wait_until(lambda: not alive(int(printed)), 2)
