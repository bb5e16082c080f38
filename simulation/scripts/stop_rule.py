"""When a run has seen enough: after so many steps, or when its peak has settled."""

from vramcast.virtual_gpu.cuda.run_record import RunRecord

SETTLED_STEPS = 3
"""Steps without a new peak, where all batches have the same shapes."""
SETTLED_VARYING_STEPS = 25
"""The same, where shapes vary: a longer batch may still come."""
MOST_STEPS = 100


class StopRule:
    """Decides after each optimizer step whether to go on; `steps` replaces the default rule."""

    def __init__(self, record: RunRecord, steps: int | None) -> None:
        self._record = record
        self._steps = steps
        self._best = (0, 0)
        self._since = 0
        self._shapes: set[tuple[tuple[int, ...], ...]] = set()

    def reason(self) -> str | None:
        """Return why the run may stop, None where it should go on."""
        record = self._record
        count, last = len(record.steps), record.steps[-1]
        if self._steps is not None:
            return f"stopped after {count} optimizer steps" if count >= self._steps else None
        self._shapes.add(last.shapes)
        peaks = (record.peak.allocated_bytes, record.peak.reserved_bytes)
        self._since = self._since + 1 if peaks == self._best else 0
        self._best = peaks
        wanted = SETTLED_STEPS if len(self._shapes) == 1 else SETTLED_VARYING_STEPS
        if self._since >= wanted:
            return f"stopped after {count} optimizer steps: no new peak in the last {self._since}"
        return f"stopped after {count} optimizer steps, the limit" if count >= MOST_STEPS else None
