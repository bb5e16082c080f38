"""A task hosts a worker process that may die or hang, and that serves the next task with the same settings."""

import os
import pickle
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from scripted_backend import DiesOnLoad, RefusesOnLoad, Scripted, alive, spec, wait_until, worker_processes

from vramcast.dataset_builder.executors import _task_host
from vramcast.dataset_builder.executors._task_host import TaskSettings, WorkerDeath, measure, versions
from vramcast.errors import UserError, WorkerError
from vramcast.virtual_gpu.measurement import Status

SETTINGS = TaskSettings(pickle.dumps(Scripted()), timeout_seconds=30, keep=True, versions=versions())


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    _task_host._idle_worker.clear()
    assert wait_until(lambda: worker_processes() == [], 5)


def pid_of(answer: Any) -> int:
    return int(answer.measurement.breakdown["pid"])


def test_a_worker_serves_tasks_with_its_settings_only() -> None:
    first, second = (pid_of(measure(SETTINGS, spec(index, "pid"))) for index in range(2))
    assert first == second
    third = pid_of(measure(replace(SETTINGS, timeout_seconds=20), spec(2, "pid")))
    assert third != first
    assert not alive(first)


def test_a_worker_without_keep_ends_with_its_task() -> None:
    assert not alive(pid_of(measure(replace(SETTINGS, keep=False), spec(0, "pid"))))


def test_an_idle_worker_ends_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_task_host, "IDLE_SECONDS", 0.1)
    pid = pid_of(measure(SETTINGS, spec(0, "pid")))
    assert wait_until(lambda: not alive(pid), 10)


def test_the_death_of_an_idle_worker_loses_no_spec() -> None:
    pid = pid_of(measure(SETTINGS, spec(0, "pid")))
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not alive(pid), 10)
    assert pid_of(measure(SETTINGS, spec(1, "pid"))) != pid


def test_a_worker_death_has_a_reason() -> None:
    death = measure(SETTINGS, spec(0, "end", 7, "cannot go on"))
    assert death == WorkerDeath("worker ended with exit code 7: cannot go on", loaded=True)
    unloaded = measure(replace(SETTINGS, backend=pickle.dumps(DiesOnLoad())), spec(0))
    assert unloaded == WorkerDeath("worker ended with exit code 3: no such library", loaded=False)


def test_a_timeout_is_an_outcome() -> None:
    answer = measure(replace(SETTINGS, timeout_seconds=0.3), spec(0, "sleep", 60))
    assert not isinstance(answer, WorkerDeath)
    assert answer.measurement.status is Status.TIMEOUT


def test_an_error_of_all_specs_is_raised() -> None:
    with pytest.raises(UserError, match="expected a GPU"):
        measure(SETTINGS, spec(0, "misuse"))
    with pytest.raises(UserError, match="expected a driver"):
        measure(replace(SETTINGS, backend=pickle.dumps(RefusesOnLoad())), spec(0))


def test_other_versions_on_a_node_are_refused() -> None:
    with pytest.raises(WorkerError, match=r"expected \{'torch': '1.0'\} on every node"):
        measure(replace(SETTINGS, versions={"torch": "1.0"}), spec(0))
