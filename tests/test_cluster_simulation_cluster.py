"""The simulated cluster against cases that were computed by hand."""

from dataclasses import replace

import pytest
from clusters import GB, job, trace, truth

from vramcast.collocation.cluster_simulation.cluster import AttemptRecord, simulate
from vramcast.collocation.cluster_simulation.cluster_metrics import cluster_metrics
from vramcast.collocation.cluster_simulation.rules import ClusterRules
from vramcast.errors import UserError

RULES = ClusterRules(gpus=1, capacity_bytes=40 * GB, slowdown=0.5, peak_after_s=10, retry_after_s=30, ledger="reserved")
SMALL, LARGE = job("small", 10, 100), job("large", 25, 100)


def ends(runs: list[AttemptRecord]) -> list[tuple[str, float]]:
    return [(run.submission.job.name, pytest.approx(run.end_s)) for run in runs]


def test_a_job_alone_runs_for_its_solo_time() -> None:
    submissions = trace((5, SMALL))
    (run,) = simulate(submissions, truth(submissions), RULES)
    assert (run.start_s, run.peak_s, run.end_s, run.gpus) == (5, 15, 105, (0,))
    result = cluster_metrics([run], RULES)
    assert (result.makespan_s, result.mean_jct_s, result.mean_wait_s, result.ooms) == (100, 100, 0, 0)
    assert result.gpu_utilisation == 1
    assert result.memory_utilisation == pytest.approx(10 / 40 * 90 / 100)  # from its peak on


def test_two_jobs_share_a_gpu_and_slow_each_other() -> None:
    submissions = trace((0, SMALL), (0, SMALL))
    assert ends(simulate(submissions, truth(submissions), RULES)) == [("small", 150), ("small", 150)]


def test_with_observed_memory_the_second_job_waits_for_the_peak_of_the_first() -> None:
    submissions = trace((0, SMALL), (0, SMALL))
    runs = simulate(submissions, truth(submissions), replace(RULES, ledger="observed"))
    # the first has 90 s left at 10 s and is slowed by half; the second has 10 s left when it is alone at 145 s
    assert [run.start_s for run in runs] == [0, 10]
    assert ends(runs) == [("small", 145), ("small", 155)]


@pytest.mark.parametrize(("remember", "start_s"), [(False, 100), (True, 10)])
def test_a_job_that_ran_before_needs_its_observed_peak(remember: bool, start_s: float) -> None:
    rules = replace(RULES, ledger="observed", remember=remember)
    runs = simulate(trace((0, SMALL), (1, SMALL)), {"small": 40 * GB}, rules)
    assert sorted(run.start_s for run in runs) == [0, start_s]


def test_a_crashed_attempt_is_not_remembered() -> None:
    submissions = trace((0, SMALL), (20, LARGE), (20, SMALL), (500, SMALL), (500, LARGE))
    rules = replace(RULES, ledger="observed", capacity_bytes=30 * GB, remember=True)
    runs = simulate(submissions, {"small": GB, "large": GB}, rules)
    # the large one crashes beside the small one, is repeated alone, and waits for a GPU of its own from then on
    assert [(run.submission.number, run.crashed) for run in runs if run.submission.job is LARGE] == [
        (1, True), (1, False), (4, False)
    ]  # fmt: skip


def test_a_job_without_enough_memory_crashes_and_is_repeated_alone() -> None:
    submissions = trace((0, LARGE), (0, LARGE))
    runs = simulate(submissions, {"large": GB}, RULES)
    crashed, first, second = runs
    assert crashed.crashed
    assert (crashed.submission.number, crashed.end_s) == (1, 10)
    # 10 s at two thirds of the speed, the rest alone
    assert (first.submission.number, first.end_s) == (0, pytest.approx(10 + 100 - 20 / 3))
    assert second.exclusive
    assert (second.start_s, second.end_s) == (first.end_s, pytest.approx(first.end_s + 100))
    result = cluster_metrics(runs, RULES)
    assert (result.ooms, result.wasted_gpu_s, result.jobs) == (1, 10, 2)
    assert result.mean_wait_s == pytest.approx((first.end_s - 10) / 2)  # the second's, from its crash to its start


def test_a_crashed_job_waits_for_the_delay() -> None:
    submissions = trace((0, job("short", 25, 15)), (0, LARGE))
    runs = simulate(submissions, {"short": GB, "large": GB}, RULES)
    assert runs[1].end_s == pytest.approx(10 + 15 - 20 / 3)  # the GPU is idle from here
    assert (runs[2].submission.number, runs[2].start_s) == (1, 40)


def test_a_crashed_job_is_placed_before_waiting_ones() -> None:
    submissions = trace((0, job("short", 25, 15)), (0, LARGE), (30, LARGE), (50, SMALL))
    runs = simulate(submissions, {"short": GB, "large": GB, "small": GB}, RULES)
    started = {run.submission.number: run.start_s for run in runs if not run.crashed}
    # from 40 s the crashed one waits for an idle GPU, and the small one behind it although there were room
    assert started == {0: 0, 2: 30, 1: 130, 3: 230}


def test_a_gpu_with_an_exclusive_job_accepts_no_other() -> None:
    submissions = trace((0, SMALL), (0, SMALL), (0, SMALL))
    runs = simulate(submissions, truth(submissions), replace(RULES, policy="exclusive"))
    assert [(run.start_s, run.end_s) for run in runs] == [(0, 100), (100, 200), (200, 300)]


@pytest.mark.parametrize(("queue", "start_s"), [("head-of-line", 100), ("backfill", 1)])
def test_a_job_without_a_place_blocks_the_others_or_is_overtaken(queue: str, start_s: float) -> None:
    submissions = trace((0, LARGE), (0, LARGE), (1, job("last", 10, 50)))
    runs = simulate(submissions, truth(submissions), replace(RULES, queue=queue, slowdown=0))
    assert next(run.start_s for run in runs if run.submission.job.name == "last") == start_s


def test_a_job_on_two_gpus_runs_at_the_speed_of_the_fuller_one() -> None:
    pair = job("pair", 10, 100, gpus=2)
    submissions = trace((0, job("whole", 40, 60)), (0, pair), (60, SMALL))
    runs = simulate(submissions, truth(submissions), replace(RULES, gpus=2))
    whole, second, first = runs
    assert (whole.end_s, whole.gpus) == (60, (0,))
    assert (second.submission.job.name, sorted(second.gpus), second.start_s) == ("pair", [0, 1], 60)
    # it shares one of its GPUs for as long as the small one runs: both at two thirds, and both for 150 s
    assert (second.end_s, first.end_s) == (pytest.approx(210), pytest.approx(210))


def test_a_job_on_two_gpus_crashes_on_both() -> None:
    pair = job("pair", 25, 100, gpus=2)
    submissions = trace((0, LARGE), (0, pair))
    runs = simulate(submissions, {"large": GB, "pair": GB}, replace(RULES, gpus=2))
    assert runs[0].crashed
    assert sorted(runs[0].gpus) == [0, 1]
    assert cluster_metrics(runs, replace(RULES, gpus=2)).wasted_gpu_s == 20


def test_a_need_above_the_capacity_gets_a_whole_gpu() -> None:
    submissions = trace((0, SMALL), (0, SMALL))
    runs = simulate(submissions, {"small": 50 * GB}, RULES)
    assert [(run.start_s, run.end_s) for run in runs] == [(0, 100), (100, 200)]


def test_a_short_job_reaches_its_peak_halfway() -> None:
    submissions = trace((0, job("short", 10, 8)))
    assert simulate(submissions, truth(submissions), RULES)[0].peak_s == 4


@pytest.mark.parametrize(
    ("late", "wanted"), [(job("wide", 1, 10, gpus=3), "raise --gpus"), (job("big", 41, 10), "larger --device")]
)
def test_a_job_that_can_never_run_is_refused(late, wanted: str) -> None:
    submissions = trace((0, SMALL), (5, late))
    with pytest.raises(UserError, match=wanted):
        simulate(submissions, truth(submissions), RULES)


@pytest.mark.parametrize("wrong", [{"gpus": 0}, {"slowdown": -1}, {"slowdown": float("nan")}, {"policy": "random"}])
def test_bad_rules_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        ClusterRules(**wrong)
