"""When a run has seen enough: after so many steps, when its peak has settled, or when each phase was seen."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.fast_forward import FastForward
    from vramcast.virtual_gpu.cuda.phases import PhaseCoverage
    from vramcast.virtual_gpu.cuda.run_record import RunRecord, StepRecord

TRAIN, AUTO, ALL = "train", "auto", "all"
PHASES = (AUTO, TRAIN, ALL)
"""How far a run goes: until each phase was seen, until the peak of training has settled, to the script's own end."""
SETTLED_STEPS = 3
"""Steps without a new peak, where all batches have the same shapes."""
SETTLED_VARYING_STEPS = 25
"""The same, where shapes vary: a longer batch may still come."""
MOST_STEPS = 100
QUIET_STEPS = 20
"""Steps without anything new after which a run ends that has seen each phase."""
FORWARD_SECONDS = 120.0
"""For the phases after the steps whose peak has settled."""


TRAINING = ("forward", "backward", "optimizer")
"""Phases in which the peak of a step is one of training."""
_FEWEST_SIZES = 4
_VARYING_SHARE = 0.25


def sizes_vary(peaks: Sequence[int]) -> bool:
    """Return True if many steps allocate sizes of their own, as those of graphs or packed objects do.

    A few sizes that come again, such as those of two networks that step by turns, are not variation.
    """
    return len(set(peaks)) >= max(_FEWEST_SIZES, _VARYING_SHARE * len(peaks))


class StopRule:
    """Decides after each optimizer step whether to go on; `steps` replaces the default rule."""

    def __init__(
        self,
        record: "RunRecord",
        forward: "FastForward",
        coverage: "PhaseCoverage",
        steps: int | None,
        phases: str = AUTO,
    ) -> None:
        self._record = record
        self._forward = forward
        self._coverage = coverage
        self._steps = steps
        self._phases = phases
        self._best = (0, 0)
        self._since = 0
        self._missing: tuple[str, ...] = ()
        self._quiet = 0
        self._begun_at = 0
        self._shapes: set[tuple[tuple[int, ...], ...]] = set()
        self._step_peaks: list[int] = []

    def reason(self) -> str | None:
        """Return why the run may stop, None where it should go on."""
        record = self._record
        count = len(record.steps)
        self._note(record.steps[-1])
        if self._steps is not None:
            return f"stopped after {count} optimizer steps" if count >= self._steps else None
        if self._phases == ALL:
            return None
        peaks = (record.peak.allocated_bytes, record.peak.reserved_bytes)
        self._since = self._since + 1 if peaks == self._best else 0
        self._best = peaks
        if self._forward.has_begun:
            return self._after_begin(count)
        wanted = SETTLED_VARYING_STEPS if self._varies() else SETTLED_STEPS
        settled = self._since >= wanted
        if settled or count >= MOST_STEPS:
            if self._phases == AUTO and (self._forward.can_forward or self._coverage.missing()):
                self._begun_at = count
                self._forward.begin()
                return None
            why = f": no new peak in the last {self._since}" if settled else ", the limit"
            return f"stopped after {count} optimizer steps{why}"
        return None

    def _note(self, step: "StepRecord") -> None:
        self._shapes.add(step.shapes)
        if step.phase in TRAINING:
            self._step_peaks.append(step.peak.allocated_bytes)

    def _varies(self) -> bool:
        return len(self._shapes) > 1 or sizes_vary(self._step_peaks[1:])

    def _after_begin(self, count: int) -> str | None:
        """Let a new peak settle, and stop where nothing is missing and nothing new has come for some steps."""
        settled = self._since >= SETTLED_STEPS or count >= self._begun_at + MOST_STEPS
        self._forward.is_active = settled
        missing = self._coverage.missing()
        news = missing != self._missing or self._since == 0
        self._missing = missing
        self._quiet = 0 if news else self._quiet + 1
        if not missing and (self._quiet >= QUIET_STEPS or count >= self._begun_at + MOST_STEPS):
            return f"stopped after {count} optimizer steps: each phase was seen, no new peak in the last {self._since}"
        return None
