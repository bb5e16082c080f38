"""The peak of a longer run than the one that was simulated, where the shapes of batches vary.

The square roots of the highest steps are taken to have an exponential tail: the excess over a high threshold has the
same mean above any higher one (Coles, An Introduction to Statistical Modeling of Extreme Values, section 4.2). Peaks of
lengths with a log-normal or lighter distribution have lighter tails than that. The mean is known from few steps, so
its upper confidence limit at the stated risk is used. `python -m benchmarks.performance.long_runs` counts how often the
result covers 1,000 steps. It holds for batches in random order alone, which `is_ordered` checks.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import NormalDist

from vramcast.models.answer import Answer
from vramcast.simulation.scripts.report import RunReport
from vramcast.simulation.scripts.stop_rule import TRAINING, sizes_vary

LONG_RUN_STEPS = 1000
_TAILS = (0.1, 0.2)
"""Parts of the steps that are the tail; the lower result holds, since a wide tail may mix two kinds of batches."""
_LEAST = 5
_ORDERED = 0.5
"""Correlation of the ranks of neighbouring steps from which they are not in random order; that has 0 +- 0.1."""
_FEWEST_FOR_ORDER = 20
_LEAST_RISK = 1e-6
_HALVINGS = 40


def growth_factor(peaks: Sequence[int], risk: float, steps: int = LONG_RUN_STEPS) -> float:
    """Return how much higher than the highest of some peaks the peak of a longer run is, at a risk that it is more."""
    if len(peaks) < 2:
        return 1.0
    roots = sorted(math.sqrt(value) for value in peaks)
    highest = min(_highest_root(roots, part, risk, steps) for part in _TAILS)
    return max((highest / roots[-1]) ** 2, 1.0)


def _highest_root(roots: Sequence[float], part: float, risk: float, steps: int) -> float:
    size = min(max(round(part * len(roots)), _LEAST), len(roots) - 1)
    threshold = roots[-size - 1]
    mean_excess = sum(value - threshold for value in roots[-size:]) / size
    exceedances = steps * size / len(roots)
    return threshold + _upper_limit(mean_excess, size, risk) * math.log(max(exceedances / risk, 1.0))


def _upper_limit(mean: float, size: int, risk: float) -> float:
    """Return the confidence limit of an exponential mean: 2 n mean / limit is a quantile of chi-square with 2 n.

    The quantile is that of Wilson and Hilferty (1931).
    """
    degrees = 2 * size
    spread = 2 / (9 * degrees)
    quantile = degrees * max(1 - spread + NormalDist().inv_cdf(risk) * math.sqrt(spread), 0.1) ** 3
    return mean * degrees / quantile


def is_ordered(peaks: Sequence[int]) -> bool:
    """Return True if neighbouring steps are alike, as those of batches sorted or grouped by length."""
    count = len(peaks)
    if count < _FEWEST_FOR_ORDER or len(set(peaks)) < 3:
        return False
    order = sorted(range(count), key=peaks.__getitem__)
    ranks = [0.0] * count
    for rank, index in enumerate(order):
        ranks[index] = rank - (count - 1) / 2
    products = sum(one * two for one, two in pairwise(ranks))
    return products / sum(rank * rank for rank in ranks) > _ORDERED


def covers_long_run(answer: Answer, report: RunReport) -> Answer:
    """Let safe figure and probability be those of a long run, if the run was stopped and its steps vary.

    Both come from one distribution: the figure at a risk grows as the risk falls, and the probability of running out of
    memory is the risk whose figure is what the device has.
    """
    training = [step for step in report.steps if step.phase in TRAINING]
    peaks = [step.allocated_bytes for step in training[1:]]
    varies = len({step.shapes for step in report.steps}) > 1 or sizes_vary(peaks)
    if not varies or not (report.has_stopped or report.forwarded_after is not None):
        return answer
    context_mib = answer.breakdown_mib.get("context", 0.0)

    def figure_mib(risk: float) -> float:
        return context_mib + growth_factor(peaks, risk) * (answer.safe_mib - context_mib)

    safe_mib = figure_mib(answer.risk)
    notes = [
        f"batches vary: the safe figure is for {LONG_RUN_STEPS:,} steps, {growth_factor(peaks, answer.risk) - 1:.0%} "
        "above the peak of this run; a run with more --steps needs less margin"
    ]
    if is_ordered(peaks):
        notes.append(
            "batches are in an order, as if sorted or grouped by length: longer ones may follow, and no risk can be "
            "stated; run a whole epoch with --steps"
        )
    oom = max(answer.oom_probability, _risk_of(figure_mib, answer.capacity_mib))
    return replace(answer, safe_mib=safe_mib, oom_probability=oom, notes=(*answer.notes, *notes))


def _risk_of(figure_mib: Callable[[float], float], capacity_mib: float) -> float:
    """Return the risk at which a figure that falls with it is the capacity: 0 and 1 where it never is."""
    low, high = _LEAST_RISK, 1 - _LEAST_RISK
    if figure_mib(low) <= capacity_mib:
        return 0.0
    if figure_mib(high) >= capacity_mib:
        return 1.0
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if figure_mib(middle) > capacity_mib else (low, middle)
    return high
