"""Tasks on a Ray cluster whose nodes and workers die: every spec has one outcome, and no process is left."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from scripted_backend import DiesOnLoad, Scripted, alive, index_of, plain, spec, wait_until

from vramcast.dataset_builder.configuration import compose_build, make_build, make_executor, settings_of
from vramcast.dataset_builder.executors import SerialExecutor
from vramcast.dataset_builder.pipeline import Build, run
from vramcast.dataset_builder.store import iter_records, read_journal
from vramcast.errors import UserError, WorkerError
from vramcast.virtual_gpu.measurement import Status

pytest.importorskip("ray", reason="needs Ray: pip install 'vramcast[ray]'")
from vramcast.dataset_builder.executors import on_ray
from vramcast.dataset_builder.executors.on_ray import RayExecutor


@pytest.fixture
def backend() -> Scripted:
    return Scripted()


def static_build(out: Path, n: int) -> Build:
    words = ["family=mlp", f"n={n}", "backend=static"]
    return make_build(settings_of(compose_build(words), words), out)


class TestLostNodes:
    def test_a_spec_on_a_lost_node_is_measured_on_another(
        self, backend: Any, ray_cluster: Any, second_node: Any, tmp_path: Path
    ) -> None:
        log, gate = tmp_path / "log", tmp_path / "gate"
        specs = [spec(index, "pass_gate", str(log), str(gate)) for index in range(2)]
        before: list[str] = []

        def lose_a_node() -> None:
            try:
                assert wait_until(lambda: log.exists() and len(log.read_text().split()) == 2, 120)
                before.extend(log.read_text().split())
                lose(ray_cluster, second_node)
            finally:
                gate.touch()  # else a failure here would leave the specs waiting

        thread = threading.Thread(target=lose_a_node)
        thread.start()
        outcomes = list(RayExecutor(retries=0).run(backend, specs))
        thread.join()
        assert sorted(index_of(item) for item, _ in outcomes) == [0, 1]
        assert {outcome.measurement.status for _, outcome in outcomes} == {Status.OK}
        assert len(before) == 2
        assert len(log.read_text().split()) == 3  # two at work at the same time, and one of them once more

    def test_a_build_has_every_row_once(self, ray_cluster: Any, second_node: Any, tmp_path: Path) -> None:
        rows = count(1)

        def on_row(_: object) -> None:
            if next(rows) == 40:
                lose(ray_cluster, second_node)

        run(static_build(tmp_path / "ray", 150), RayExecutor(), on_row, lambda _: None)
        run(static_build(tmp_path / "serial", 150), SerialExecutor(), lambda _: None, lambda _: None)
        ids = [row.spec.id for row in read_journal(tmp_path / "ray").rows]
        assert len(ids) == 150
        assert sorted(ids) == sorted(row.spec.id for row in read_journal(tmp_path / "serial").rows)

    def test_the_capacity_follows_the_nodes(self, ray_cluster: Any, request: pytest.FixtureRequest) -> None:
        executor = RayExecutor()
        assert wait_until(lambda: executor.slots() == 1, 30)  # nodes of other tests may not be known to be gone
        node = request.getfixturevalue("second_node")
        assert executor.slots() == 2
        assert [RayExecutor(gpus=1).slots(), RayExecutor(cpus=0.5).slots(), RayExecutor(cpus=2).slots()] == [1, 4, 0]
        ray_cluster.remove_node(node)
        assert wait_until(lambda: executor.slots() == 1, 30)

    def test_a_spec_that_loses_every_node_is_a_crash(self) -> None:
        task = on_ray._Task(spec(0))
        outcomes = [task.lose_node("NodeDiedError: gone") for _ in range(10)]
        assert outcomes[:-1] == [None] * 9
        assert outcomes[-1]
        assert outcomes[-1].measurement.status is Status.CRASHED
        assert outcomes[-1].measurement.evidence == "10 attempts, the last: NodeDiedError: gone"


@pytest.mark.usefixtures("ray_cluster")
class TestDeathsOfWorkers:
    @pytest.mark.parametrize(
        ("do", "evidence"),
        [
            (("end", 7, "cannot go on"), "2 attempts, the last: worker ended with exit code 7: cannot go on"),
            (("kill", signal.SIGSEGV), "2 attempts, the last: worker killed by SIGSEGV"),
            (("kill_host",), "2 attempts, the last: WorkerCrashedError: The worker died unexpectedly"),
        ],
    )
    def test_a_spec_that_dies_at_every_attempt_is_a_crash(self, backend: Any, do: Any, evidence: str) -> None:
        specs = [spec(0), spec(1, *do), spec(2)]
        outcomes = {index_of(item): outcome for item, outcome in RayExecutor(retries=1).run(backend, specs)}
        assert [outcomes[index].measurement.status for index in range(3)] == ["ok", "crashed", "ok"]
        assert (outcomes[1].measurement.evidence or "").startswith(evidence)

    def test_a_death_with_another_cause_costs_one_attempt(self, backend: Any, tmp_path: Path) -> None:
        log, gate = tmp_path / "log", tmp_path / "gate"

        def kill_the_worker() -> None:
            assert wait_until(lambda: log.exists() and log.read_text().endswith("\n"), 30)
            os.kill(int(log.read_text()), signal.SIGKILL)
            gate.touch()

        thread = threading.Thread(target=kill_the_worker)
        thread.start()
        ((_, outcome),) = RayExecutor(retries=1).run(backend, [spec(0, "pass_gate", str(log), str(gate))])
        thread.join()
        assert outcome.measurement.status is Status.OK
        assert len(log.read_text().split()) == 2

    def test_death_on_every_spec_ends_the_run(self, backend: Any) -> None:
        with pytest.raises(WorkerError, match=r"10 specs in a row whose workers died .*exit code 4: bad GPU"):
            list(RayExecutor(retries=0).run(backend, (spec(index, "end", 4, "bad GPU") for index in count())))

    def test_a_backend_that_kills_its_process_ends_the_run(self) -> None:
        with pytest.raises(WorkerError, match=r"died while they started .*exit code 3: no such library"):
            list(RayExecutor().run(DiesOnLoad(), map(spec, count())))

    def test_a_hanging_spec_is_killed_with_its_children(self, backend: Any, tmp_path: Path) -> None:
        file = tmp_path / "pids"
        specs = [spec(0), spec(1, "hang", str(file)), spec(2)]
        outcomes = {index_of(item): outcome for item, outcome in RayExecutor(timeout_seconds=1).run(backend, specs)}
        assert [outcomes[index].measurement.status for index in range(3)] == ["ok", "timeout", "ok"]
        assert outcomes[1].measurement.evidence == "no result after 1 s"
        assert wait_until(lambda: not any(alive(int(pid)) for pid in file.read_text().split()), 2)

    def test_closing_ends_running_tasks(self, backend: Any, tmp_path: Path) -> None:
        file = tmp_path / "pids"
        outcomes = RayExecutor().run(backend, [spec(0), spec(1, "hang", str(file)), *plain(3)])
        next(outcomes)
        assert wait_until(file.exists, 30)
        outcomes.close()
        assert wait_until(lambda: not any(alive(int(pid)) for pid in file.read_text().split()), 60)


class TestGpus:
    def test_a_gpu_has_one_spec_at_a_time_in_its_own_process(self, backend: Any, second_node: Any) -> None:
        measurements = [outcome.measurement for _, outcome in RayExecutor(gpus=1).run(backend, [spec(0, "gpu")] * 3)]
        assert [measured.breakdown["gpu"] for measured in measurements] == [0, 0, 0]
        pids = {measured.breakdown["pid"] for measured in measurements}
        assert len(pids) == 3  # the context of one would be in the figures of the next
        assert not any(map(alive, pids))

    def test_a_cluster_without_capacity_is_one_error(self, backend: Any, ray_cluster: Any) -> None:
        with pytest.raises(UserError, match="expected a node with 1 CPU and 4 GPU"):
            list(RayExecutor(gpus=4).run(backend, plain(1)))

    def test_only_the_cuda_backend_needs_a_gpu_by_default(self, backend: Any) -> None:
        config = compose_build(["executor=ray", "backend=virtual"])
        assert make_executor(config, backend).gpus == 0  # type: ignore[attr-defined]
        backend.name = "cuda"
        assert make_executor(config, backend).gpus == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "wrong",
    [
        {"address": ""},
        {"address": 6379},
        {"cpus": 0},
        {"cpus": float("nan")},
        {"gpus": 0.5},
        {"retries": -1},
        {"timeout_seconds": 0},
        {"in_flight": 0},
        {"wait_seconds": "long"},
        {"runtime_env": "pip"},
    ],
)
def test_bad_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        RayExecutor(**wrong)


@pytest.mark.parametrize(
    ("address", "reason"), [("127.0.0.1:1", "ConnectionRefusedError"), ("nonsense", "Invalid address format")]
)
def test_an_address_without_a_cluster_is_one_error(address: str, reason: str, ray_cluster: Any) -> None:
    with pytest.raises(UserError, match=f"expected a Ray cluster at executor.address={address}, found .*{reason}"):
        on_ray._connect(address, {})


@pytest.mark.slow
class TestDriver:
    """`vramcast build` in its own process."""

    def start(self, out: Path, n: int, *words: str) -> "subprocess.Popen[str]":
        build = ["family=mlp", f"n={n}", "backend=static", "executor=ray", f"out={out}", *words]
        return subprocess.Popen(
            [sys.executable, "-m", "vramcast", "build", *build],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def stopped_by(self, stop: Callable[["subprocess.Popen[str]"], None], out: Path, *arguments: Any) -> set[str]:
        """Return the ids of a build that was stopped in the middle."""
        driver = self.start(out, *arguments)
        before = ids_in(out)
        try:
            assert wait_until(lambda: len(ids_in(out)) > len(before) + 20, 120)
        finally:
            stop(driver)
            driver.communicate(timeout=180)
        return set(ids_in(out))

    def test_the_same_command_resumes_after_an_interrupt_and_a_kill(self, ray_cluster: Any, tmp_path: Path) -> None:
        arguments = (300, f"executor.address={ray_cluster.address}")
        first = self.stopped_by(lambda driver: os.killpg(driver.pid, signal.SIGINT), tmp_path, *arguments)
        second = self.stopped_by(lambda driver: os.killpg(driver.pid, signal.SIGKILL), tmp_path, *arguments)
        assert first < second
        assert len(second) < 300
        driver = self.start(tmp_path, *arguments)
        output, errors = driver.communicate(timeout=180)
        assert driver.returncode == 0, errors
        assert output.startswith(f"300 rows ({len(second)} resumed")
        ids = ids_in(tmp_path)
        assert len(ids) == len(set(ids)) == 300
        assert second < set(ids)

    def test_a_cluster_started_for_a_build_ends_with_it(self, tmp_path: Path) -> None:
        members: dict[int, str] = {}

        def kill(driver: "subprocess.Popen[str]") -> None:
            members.update({pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in descendants(driver.pid)})
            driver.kill()

        self.stopped_by(kill, tmp_path, 2000)
        agents = {pid for pid, command in members.items() if command.startswith("ray::") and "Agent" in command}
        ours = {pid for pid, command in members.items() if "_worker_main" in command}
        assert ours
        try:
            assert wait_until(lambda: not any(map(alive, members.keys() - agents)), 20)
        finally:
            for pid in filter(alive, members):  # Ray's agents look for their dead raylet for another minute
                os.kill(pid, signal.SIGKILL)


def ids_in(out: Path) -> list[str]:
    if not (out / "journal.jsonl").exists():
        return []
    return [record.spec.id for record in iter_records(out, lambda _: None) if hasattr(record, "measurement")]


def descendants(pid: int) -> set[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    children = {int(child) for task in tasks for child in task.read_text().split()}
    return children.union(*map(descendants, children))


def lose(cluster: Any, node: Any) -> None:
    """Kill all processes of a node; without the raylet alone, its workers would run on for a while."""
    raylet = node.all_processes["raylet"][0].process.pid
    for pid in [raylet, *descendants(raylet)]:
        os.kill(pid, signal.SIGKILL)
    cluster.remove_node(node, allow_graceful=False)
