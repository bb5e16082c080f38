"""Invariants of all simulations: every job finishes, and memory never exceeds the capacity."""

from collections import defaultdict
from itertools import pairwise

import pytest
from clusters import GB, job, trace, truth
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.soak.extreme_traces import fault
from vramcast.collocation.cluster_simulation.cluster import AttemptRecord, simulate
from vramcast.collocation.cluster_simulation.cluster_metrics import cluster_metrics
from vramcast.collocation.cluster_simulation.free_memory import CLOSED, free_memory
from vramcast.collocation.cluster_simulation.rules import LEDGERS, QUEUES, ClusterRules
from vramcast.collocation.cluster_simulation.workload import Submission
from vramcast.collocation.placement import POLICIES, GpuState, rank
from vramcast.errors import UserError

CAPACITY = 40 * GB
KINDS = st.builds(
    lambda peak_gb, solo_s, gpus: job(f"{peak_gb}GB {solo_s}s x{gpus}", peak_gb, solo_s, gpus),
    st.integers(1, 40),
    st.integers(1, 500),
    st.integers(1, 2),
)
TRACES = st.lists(st.tuples(st.integers(0, 600), KINDS), min_size=1, max_size=14).map(
    lambda arrivals: trace(*sorted(arrivals, key=lambda item: item[0]))
)
RULES = st.builds(
    ClusterRules,
    gpus=st.integers(2, 4),
    capacity_bytes=st.just(CAPACITY),
    policy=st.sampled_from(POLICIES),
    queue=st.sampled_from(QUEUES),
    ledger=st.sampled_from(LEDGERS),
    remember=st.booleans(),
    slowdown=st.sampled_from([0.0, 0.4, 1.0]),
    peak_after_s=st.sampled_from([0.0, 22.6]),
    retry_after_s=st.sampled_from([0.0, 30.0]),
)
SHARES = st.floats(0.0, 1.5)
"""The need of a job as a share of its peak."""


def moments(runs: list[AttemptRecord]) -> list[float]:
    return sorted({time_s for run in runs for time_s in (run.start_s, run.end_s, run.peak_s) if time_s is not None})


def on(runs: list[AttemptRecord], gpu: int, time_s: float) -> list[AttemptRecord]:
    return [run for run in runs if gpu in run.gpus and run.start_s <= time_s < run.end_s]


def work_s(run: AttemptRecord, runs: list[AttemptRecord], rules: ClusterRules) -> float:
    """Return the work of an attempt, computed from the attempts beside it."""
    times_s = [time_s for time_s in moments(runs) if run.start_s <= time_s <= run.end_s]
    return sum(
        (end_s - start_s) * rules.rate(max(len(on(runs, gpu, (start_s + end_s) / 2)) for gpu in run.gpus))
        for start_s, end_s in pairwise(times_s)
    )


@settings(deadline=None, max_examples=150)
@given(TRACES, RULES, SHARES)
def test_every_job_finishes_once_and_gets_its_work_done(
    submissions: list[Submission], rules: ClusterRules, share: float
) -> None:
    needs = {name: int(peak_bytes * share) for name, peak_bytes in truth(submissions).items()}
    runs = simulate(submissions, needs, rules)
    finished = [run for run in runs if not run.crashed]
    assert sorted(run.submission.number for run in finished) == list(range(len(submissions)))
    for run in runs:
        assert run.start_s >= run.submission.arrival_s
        assert len(set(run.gpus)) == run.submission.job.gpus
    for run in finished:
        assert work_s(run, runs, rules) == pytest.approx(run.submission.job.solo_s, abs=1e-6)
    attempts = defaultdict(int)
    for run in runs:
        attempts[run.submission.number] += 1
    assert max(attempts.values()) <= 2  # alone, all that runs at all runs
    result = cluster_metrics(runs, rules)
    assert result.ooms == len(runs) - len(submissions)
    assert 0 < result.gpu_utilisation <= 1 + 1e-9
    assert 0 <= result.memory_utilisation <= result.gpu_utilisation + 1e-9
    assert result.mean_wait_s >= -1e-6
    assert result.p95_jct_s <= result.makespan_s + 1e-6


@settings(deadline=None, max_examples=150)
@given(TRACES, RULES, SHARES)
def test_memory_never_exceeds_the_capacity_and_exclusive_jobs_are_alone(
    submissions: list[Submission], rules: ClusterRules, share: float
) -> None:
    needs = {name: int(peak_bytes * share) for name, peak_bytes in truth(submissions).items()}
    runs = simulate(submissions, needs, rules)
    for time_s in moments(runs):
        for gpu in range(rules.gpus):
            present = on(runs, gpu, time_s)
            held = [run for run in present if run.peak_s is not None and run.peak_s <= time_s]
            assert sum(run.submission.job.peak_bytes for run in held) <= CAPACITY
            assert len(present) == 1 or not any(run.exclusive for run in present)


@settings(deadline=None, max_examples=100)
@given(TRACES, RULES, st.floats(1.0, 3.0))
def test_a_job_with_enough_need_never_crashes_and_the_queue_is_in_order(
    submissions: list[Submission], rules: ClusterRules, share: float
) -> None:
    needs = {name: int(peak_bytes * share) + 1 for name, peak_bytes in truth(submissions).items()}
    runs = simulate(submissions, needs, rules)
    assert not any(run.crashed for run in runs)
    if rules.queue == "head-of-line":
        in_order = sorted(runs, key=lambda run: run.submission.number)
        assert all(before.start_s <= after.start_s for before, after in pairwise(in_order))


@settings(deadline=None, max_examples=50)
@given(TRACES, RULES, SHARES)
def test_a_simulation_is_deterministic(submissions: list[Submission], rules: ClusterRules, share: float) -> None:
    needs = {name: int(peak_bytes * share) for name, peak_bytes in truth(submissions).items()}
    assert simulate(submissions, needs, rules) == simulate(submissions, needs, rules)


@pytest.mark.parametrize("policy", POLICIES)
@given(data=st.data())
@settings(deadline=None, max_examples=100)
def test_the_index_makes_the_same_choice_as_the_placement_of_the_service(policy: str, data: st.DataObject) -> None:
    gpus = data.draw(st.integers(1, 9))
    index, free = free_memory(policy, gpus, 8), [8] * gpus
    for _ in range(data.draw(st.integers(0, 12))):
        gpu = data.draw(st.integers(0, gpus - 1))
        free[gpu] = data.draw(st.sampled_from([CLOSED, *range(9)]))
        index.set(gpu, free[gpu])
        need, count = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 3))
        ranked = rank(need, [GpuState(str(number), free_mib, 8) for number, free_mib in enumerate(free)], policy)
        expected = tuple(int(result.gpu.id) for result in ranked[:count]) if len(ranked) >= count else None
        assert index.choose(need, count) == expected


def test_extreme_traces_lose_no_job_and_run_out_of_no_memory() -> None:
    assert {seed: text for seed in range(400) if (text := fault(seed))} == {}


@pytest.mark.parametrize(("arrival_s", "solo_s"), [(1.7e18, 100), (1e300, 1), (1e9, 1e-6)])
def test_times_beyond_the_precision_of_floats_are_refused(arrival_s: float, solo_s: float) -> None:
    submissions = trace((arrival_s, job("a", 1, solo_s)))
    with pytest.raises(UserError, match="expected times of at most"):
        simulate(submissions, truth(submissions), ClusterRules())
