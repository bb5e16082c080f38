"""A task hosts a worker process: it may die or hang, and serves the next task of the same job."""

import multiprocessing
import os
import pickle
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from scripted_backend import DiesOnLoad, RefusesOnLoad, Scripted, alive, spec, wait_until

from vramcast.dataset_builder.executors import _hosted
from vramcast.dataset_builder.executors._hosted import Died, Job, measure, versions
from vramcast.errors import UserError, WorkerError
from vramcast.virtual_gpu.measurement import Status

JOB = Job(pickle.dumps(Scripted()), timeout_seconds=30, keep=True, versions=versions())


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    _hosted._shelf.clear()
    assert wait_until(lambda: multiprocessing.active_children() == [], 5)


def pid_of(answer: Any) -> int:
    return int(answer.measurement.breakdown["pid"])


def test_a_worker_serves_the_tasks_of_its_job_and_no_other() -> None:
    first, second = (pid_of(measure(JOB, spec(index, "pid"))) for index in range(2))
    assert first == second
    third = pid_of(measure(replace(JOB, timeout_seconds=20), spec(2, "pid")))
    assert third != first
    assert not alive(first)


def test_a_worker_that_is_not_to_be_kept_is_gone_when_its_task_ends() -> None:
    assert not alive(pid_of(measure(replace(JOB, keep=False), spec(0, "pid"))))


def test_a_worker_is_not_kept_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_hosted, "IDLE_SECONDS", 0.1)
    pid = pid_of(measure(JOB, spec(0, "pid")))
    assert wait_until(lambda: not alive(pid), 10)


def test_a_worker_that_died_while_it_was_kept_costs_no_spec() -> None:
    pid = pid_of(measure(JOB, spec(0, "pid")))
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not alive(pid), 10)
    assert pid_of(measure(JOB, spec(1, "pid"))) != pid


def test_how_a_worker_died_is_told() -> None:
    assert measure(JOB, spec(0, "end", 7, "cannot go on")) == Died("worker ended with exit code 7: cannot go on", True)
    unloaded = measure(replace(JOB, backend=pickle.dumps(DiesOnLoad())), spec(0))
    assert unloaded == Died("worker ended with exit code 3: no such library", loaded=False)


def test_a_spec_out_of_time_is_an_outcome() -> None:
    answer = measure(replace(JOB, timeout_seconds=0.3), spec(0, "sleep", 60))
    assert not isinstance(answer, Died)
    assert answer.measurement.status is Status.TIMEOUT


def test_what_concerns_all_specs_is_raised() -> None:
    with pytest.raises(UserError, match="expected a card"):
        measure(JOB, spec(0, "misuse"))
    with pytest.raises(UserError, match="expected a driver"):
        measure(replace(JOB, backend=pickle.dumps(RefusesOnLoad())), spec(0))


def test_other_versions_on_a_node_are_refused() -> None:
    with pytest.raises(WorkerError, match=r"expected \{'torch': '1.0'\} on every node"):
        measure(replace(JOB, versions={"torch": "1.0"}), spec(0))
