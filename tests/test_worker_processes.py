"""Worker processes that hang, crash or are interrupted lose one spec at most, and none outlives the run."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from itertools import count, islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import scripted_backend
from scripted_backend import DiesOnLoad, RefusesOnLoad, Scripted, alive, index_of, plain, spec, wait_until

from vramcast.dataset_builder.executors import LocalExecutor
from vramcast.errors import UserError, WorkerError
from vramcast.virtual_gpu.measurement import Status

pytestmark = pytest.mark.usefixtures("no_process_is_left")


@pytest.fixture
def backend() -> Scripted:
    return Scripted()


class TestDeathOfWorkers:
    """The death of a worker affects one spec."""

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
    def test_only_the_current_spec_crashes(self, backend: Any, do: tuple[Any, ...], evidence: str) -> None:
        bad = {0, 150, 151}
        specs = [spec(index, *do) if index in bad else spec(index) for index in range(200)]
        outcomes = [(index_of(item), outcome.measurement) for item, outcome in LocalExecutor(2).run(backend, specs)]
        assert sorted(index for index, _ in outcomes) == list(range(200))
        assert {index for index, measured in outcomes if measured.status is Status.CRASHED} == bad
        assert all((measured.evidence or "").startswith(evidence) for index, measured in outcomes if index in bad)
        assert all(measured.status is Status.OK for index, measured in outcomes if index not in bad)

    def test_a_worker_that_closes_its_connection_is_killed(self, backend: Any) -> None:
        start = time.monotonic()
        ((_, outcome),) = LocalExecutor(1).run(backend, [spec(0, "deafen")])
        assert outcome.measurement.status is Status.CRASHED
        assert time.monotonic() - start < 5

    def test_a_few_specs_that_all_die_are_outcomes(self, backend: Any) -> None:
        specs = [spec(index, "kill", signal.SIGKILL) for index in range(4)]
        outcomes = list(LocalExecutor(2).run(backend, specs))
        assert [outcome.measurement.status for _, outcome in outcomes] == ["crashed"] * 4

    def test_death_on_every_spec_ends_the_run(self, backend: Any) -> None:
        outcomes = LocalExecutor(2).run(backend, (spec(index, "end", 4, "bad GPU") for index in count()))
        with pytest.raises(WorkerError, match=r"died on their first spec .*exit code 4: bad GPU"):
            list(outcomes)

    def test_an_idle_worker_may_die(self, backend: Any) -> None:
        with closing(LocalExecutor(1).run(backend, (spec(index, "pid") for index in count()))) as outcomes:
            pid = next(outcomes)[1].measurement.breakdown["pid"]
            os.kill(pid, signal.SIGKILL)
            measurements = [outcome.measurement for _, outcome in islice(outcomes, 300)]
        assert sum(measured.status is Status.CRASHED for measured in measurements) <= 1
        assert measurements[-1].breakdown["pid"] != pid


class TestStart:
    """A worker that cannot start ends the run with the reason."""

    def test_a_backend_that_workers_cannot_import(self, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        here = ModuleType("only_here")
        here.Hidden = type("Hidden", (type(backend),), {"__module__": "only_here"})  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "only_here", here)
        with pytest.raises(WorkerError, match="ModuleNotFoundError: No module named 'only_here'"):
            list(LocalExecutor(2).run(here.Hidden(), plain(3)))

    def test_a_backend_that_kills_its_process(self) -> None:
        start = time.monotonic()
        with pytest.raises(WorkerError, match=r"died while they started .*exit code 3: no such library"):
            list(LocalExecutor(2).run(DiesOnLoad(), map(spec, count())))
        assert time.monotonic() - start < 10

    def test_a_backend_that_refuses(self) -> None:
        with pytest.raises(UserError, match="expected a driver"):
            list(LocalExecutor(2).run(RefusesOnLoad(), plain(3)))


class TestTimeLimit:
    def test_a_hanging_spec_is_killed_with_its_children(self, backend: Any, tmp_path: Path) -> None:
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

    def test_the_limit_applies_to_one_spec(self, backend: Any) -> None:
        specs = [spec(index, "sleep", 0.15) for index in range(8)]
        statuses = [outcome.measurement.status for _, outcome in LocalExecutor(1, 0.9).run(backend, specs)]
        assert statuses == ["ok"] * 8

    def test_a_slow_caller_causes_no_timeout(self, backend: Any) -> None:
        statuses = []
        for _, outcome in LocalExecutor(2, 0.6).run(backend, plain(400)):
            statuses.append(outcome.measurement.status)
            if len(statuses) in (1, 200):
                time.sleep(0.9)
        assert statuses == ["ok"] * 400


class TestEnd:
    """No process outlives the run."""

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
            pids = [outcome.measurement.breakdown["pid"] for _, outcome in islice(outcomes, 200)]
        assert set(pids) == {first[0][1].measurement.breakdown["pid"]}


PARENT = """
import sys, time
from itertools import count
from scripted_backend import Scripted
from vramcast.dataset_builder.executors import LocalExecutor
from vramcast.jobs.spec import Spec
from vramcast.virtual_gpu.training.setup import TrainingSetup

def spec(do, *args):
    return Spec("mlp", {"index": 0, "do": do, "with": list(args)}, TrainingSetup(batch_size=1))

class Here(Scripted):
    pass

if __name__ == "__main__":
"""


class TestParent:
    """The parent is a program with its own backend that ends in several ways."""

    def start(self, folder: Path, body: str) -> "subprocess.Popen[str]":
        script = folder / "parent.py"
        script.write_text(PARENT + "\n".join(f"    {line}" for line in body.splitlines()))
        path = os.pathsep.join([str(Path(scripted_backend.__file__).parent), *filter(None, sys.path)])
        return subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def hanging(self, folder: Path) -> tuple["subprocess.Popen[str]", list[int]]:
        """Start a parent with two hanging workers; return it with the process ids of all but the parent."""
        body = 'specs = [spec("hang", sys.argv[1] + "/one"), spec("hang_with_lock", sys.argv[1] + "/two")]\n'
        parent = self.start(folder, body + "list(LocalExecutor(2).run(Here(), specs))")
        files = [folder / "one", folder / "two"]
        assert wait_until(lambda: all(file.exists() and file.read_text() for file in files), 10)
        pids = [int(text) for file in files for text in file.read_text().split()]
        assert len(pids) == 3
        assert all(map(alive, pids))
        return parent, pids

    def test_killed(self, tmp_path: Path) -> None:
        parent, pids = self.hanging(tmp_path)
        parent.kill()
        parent.communicate(timeout=10)
        assert wait_until(lambda: not any(map(alive, pids)), 5)

    def test_interrupted(self, tmp_path: Path) -> None:
        parent, pids = self.hanging(tmp_path)
        os.killpg(parent.pid, signal.SIGINT)
        _, errors = parent.communicate(timeout=5)
        assert errors.count("Traceback") == errors.count("KeyboardInterrupt") == 1
        assert wait_until(lambda: not any(map(alive, pids)), 2)

    @pytest.mark.parametrize("delay", [0.05, 0.1, 0.15, 0.2])
    def test_interrupted_while_workers_start(self, tmp_path: Path, delay: float) -> None:
        body = 'print("up", flush=True)\nlist(LocalExecutor(4).run(Here(), (spec("nothing") for _ in count())))'
        parent = self.start(tmp_path, body)
        assert parent.stdout
        assert parent.stdout.readline() == "up\n"
        time.sleep(delay)
        os.killpg(parent.pid, signal.SIGINT)
        _, errors = parent.communicate(timeout=5)
        assert errors.count("Traceback") == errors.count("KeyboardInterrupt") == 1, errors

    def test_ended_with_outcomes_to_come(self, tmp_path: Path) -> None:
        body = 'outcomes = LocalExecutor(2).run(Here(), (spec("pid") for _ in count()))\n'
        body += 'print(next(outcomes)[1].measurement.breakdown["pid"])'
        parent = self.start(tmp_path, body)
        printed, errors = parent.communicate(timeout=10)
        assert not errors
        assert wait_until(lambda: not alive(int(printed)), 2)
