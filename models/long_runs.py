"""The peak of a longer run than the one that was simulated, where the shapes of batches vary.

The highest steps of a run have about an exponential tail: the excess over a high threshold has the same mean above any
higher one. The peak of many more steps follows from that mean (Coles, An Introduction to Statistical Modeling of
Extreme Values, section 4.2, with shape 0).
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from vramcast.dataset_builder.run.report import RunReport
from vramcast.models.answer import Answer

LONG_RUN_STEPS = 1000
_TAIL = 0.2
"""The part of the steps that is the tail."""
_LEAST = 5


def growth_factor(peaks: Sequence[int], risk: float, steps: int = LONG_RUN_STEPS) -> float:
    """Return how much higher than the highest of some peaks the peak of a longer run is, at a risk that it is more."""
    if len(peaks) < 2:
        return 1.0
    ranked = sorted(peaks)
    size = min(max(round(_TAIL * len(ranked)), _LEAST), len(ranked) - 1)
    threshold = ranked[-size - 1]
    mean_excess = sum(value - threshold for value in ranked[-size:]) / size
    exceedances = steps * size / len(ranked)
    highest = threshold + mean_excess * math.log(exceedances / risk)
    return max(highest / ranked[-1], 1.0)


def covers_long_run(answer: Answer, report: RunReport) -> Answer:
    """Raise the safe figure to that of a long run, if the run was stopped and its batches vary."""
    varies = len({step.shapes for step in report.steps}) > 1
    if not varies or not report.ending.startswith("stopped"):
        return answer
    peaks = [step.allocated_bytes for step in report.steps[1:]]
    factor = growth_factor(peaks, answer.risk)
    context_mib = answer.breakdown_mib.get("context", 0.0)
    note = f"batches vary: the safe figure is for {LONG_RUN_STEPS:,} steps, {factor - 1:.0%} above the peak of this run"
    return replace(answer, safe_mib=context_mib + factor * (answer.safe_mib - context_mib), notes=(*answer.notes, note))
