"""Random traces with extreme values for the cluster simulator."""

import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vramcast.collocation.cluster_simulation.cluster import simulate
from vramcast.collocation.cluster_simulation.cluster_metrics import cluster_metrics
from vramcast.collocation.cluster_simulation.rules import LEDGERS, QUEUES, ClusterRules
from vramcast.collocation.cluster_simulation.workload import Submission, TraceJob
from vramcast.collocation.placement import POLICIES
from vramcast.errors import UserError

CAPACITY_BYTES = 40 << 30
_TIMES_S = (0.0, 1e-12, 1e-3, 1.0, 22.6, 22.6, 600.0, 3600.0, 1e6, 1e9)
_SOLO_S = (1e-6, 1e-3, 0.1, 1.0, 45.2, 45.2, 3600.0, 1e6)
_SLOWDOWNS = (0.0, 1e-12, 0.4, 1.0, 1e3)
_BEYOND = (1e12, 1.7e18, 1e300)
"""Values that are refused unless all jobs are long."""
_SECONDS = 20


def generated(seed: int) -> tuple[list[Submission], dict[str, int], ClusterRules]:
    """Return a trace, needs that cover the peaks, and rules."""
    draw = random.Random(seed)
    gpus = draw.randint(1, 6)
    rules = ClusterRules(
        gpus=gpus,
        capacity_bytes=CAPACITY_BYTES,
        policy=draw.choice(POLICIES),
        queue=draw.choice(QUEUES),
        ledger=draw.choice(LEDGERS),
        remember=draw.random() < 0.5,
        slowdown=_value(draw, _SLOWDOWNS),
        peak_after_s=_value(draw, _TIMES_S),
        retry_after_s=_value(draw, _TIMES_S),
        backfill_depth=draw.choice([1, 2, 500]),
    )
    base_s = _value(draw, _TIMES_S)
    jobs = [_job(draw, str(index), gpus) for index in range(draw.randint(1, 6))]
    arrivals = sorted(
        base_s + draw.choice([0.0, 0.0, 1e-9, draw.random(), _value(draw, _TIMES_S)])
        for _ in range(draw.randint(1, 30))
    )
    submissions = [Submission(number, arrival_s, draw.choice(jobs)) for number, arrival_s in enumerate(arrivals)]
    needs = {
        job.name: draw.choice([job.peak_bytes, job.peak_bytes + 1, CAPACITY_BYTES, 2 * CAPACITY_BYTES]) for job in jobs
    }
    return submissions, needs, rules


def _value(draw: random.Random, values: Sequence[float]) -> float:
    return draw.choice(_BEYOND if draw.random() < 0.01 else values)


def _job(draw: random.Random, name: str, gpus: int) -> TraceJob:
    peak_bytes = draw.choice([1, 1 << 20, CAPACITY_BYTES // 2, CAPACITY_BYTES // 2 + 1, CAPACITY_BYTES])
    solo_s = _value(draw, _SOLO_S) * draw.choice([1.0, draw.random() + 1e-6])
    return TraceJob(name, draw.randint(1, gpus), 1, peak_bytes, solo_s)


def fault(seed: int) -> str | None:
    """Run a trace, and return what is wrong with its result. A refusal in one sentence is right."""
    submissions, needs, rules = generated(seed)
    try:
        with _time_limit():
            records = simulate(submissions, needs, rules)
            metrics = cluster_metrics(records, rules).to_json()
    except UserError as error:
        return None if "expected times" in str(error) else f"refused: {error}"
    except Exception as error:
        return repr(error)
    finished = sorted(item.submission.number for item in records if not item.crashed)
    if finished != list(range(len(submissions))):
        return "jobs were lost"
    if any(item.crashed for item in records):
        return "out of memory, although the needs cover the peaks"
    if not all(abs(value) < float("inf") for value in metrics.values()):
        return f"metrics that are not finite: {metrics}"
    return None


@contextmanager
def _time_limit() -> Iterator[None]:
    """Raise `TimeoutError` in a simulation that does not end."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"still running after {_SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
