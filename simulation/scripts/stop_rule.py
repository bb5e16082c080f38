"""When a run has seen enough: after so many steps, when its peak has settled, or when each phase was seen."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.fast_forward import FastForward
    from vramcast.virtual_gpu.cuda.phases import PhaseCoverage
    from vramcast.virtual_gpu.cuda.run_record import RunRecord

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

    def reason(self) -> str | None:
        """Return why the run may stop, None where it should go on."""
        record = self._record
        count, last = len(record.steps), record.steps[-1]
        if self._steps is not None:
            return f"stopped after {count} optimizer steps" if count >= self._steps else None
        if self._phases == ALL:
            return None
        self._shapes.add(last.shapes)
        peaks = (record.peak.allocated_bytes, record.peak.reserved_bytes)
        self._since = self._since + 1 if peaks == self._best else 0
        self._best = peaks
        if self._forward.has_begun:
            return self._after_begin(count)
        wanted = SETTLED_STEPS if len(self._shapes) == 1 else SETTLED_VARYING_STEPS
        settled = self._since >= wanted
        if settled or count >= MOST_STEPS:
            if self._phases == AUTO and (self._forward.can_forward or self._coverage.missing()):
                self._begun_at = count
                self._forward.begin()
                return None
            why = f": no new peak in the last {self._since}" if settled else ", the limit"
            return f"stopped after {count} optimizer steps{why}"
        return None

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
