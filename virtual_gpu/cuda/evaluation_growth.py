"""Evaluations that end early: what they collect on the device grows with each batch, up to the length of the loader.

An evaluation over many batches shows after some of them what a batch takes and what it leaves behind. The loader then
ends, and blocks stand for what the other batches would have left: as many bytes for each batch as the last ones took.
Tensors that are made of all that was collected (`torch.cat` of a list) are enlarged in the same proportion.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vramcast.virtual_gpu.cuda.run_record import Peak

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.assumptions import Assumptions
    from vramcast.virtual_gpu.cuda.run_record import RunRecord
    from vramcast.virtual_gpu.cuda.script_memory import ScriptMemory

MOST_BATCHES = 60
"""Batches of an evaluation whose loader ends early, where the last ones had no new peak but for a steady growth."""
MOST_VARYING_BATCHES = 200
"""The same in any case."""
_STEADY = 20
_MOST_BLOCKS = 10_000
_TOLERANCE = 0.02


class EvaluationGrowth:
    """Follows the batches of an evaluation, and holds what those that are left out would have held."""

    def __init__(
        self,
        record: "RunRecord",
        memory: "ScriptMemory",
        assumptions: "Assumptions",
        allocate: Callable[[int], Tensor],
    ) -> None:
        self._window = Peak()
        record.windows.append(self._window)
        self._memory = memory
        self._assumptions = assumptions
        self._allocate = allocate
        self._held: list[Tensor] = []
        self.seen = 0
        """Batches of the evaluation that was ended early, 0 if none was."""
        self._ratio = 1.0
        """By which what was collected is too small."""

    def ends(self, epoch: "EvaluationEpoch", length: int | None) -> bool:
        """Note that a batch is over; return True if the loader is to end, and hold what is then missing."""
        epoch.note(self._memory.allocator.allocated_bytes, self._window.allocated_bytes)
        self._window.allocated_bytes = 0
        seen = len(epoch.held)
        if seen < MOST_BATCHES or (length is not None and length <= seen + _STEADY):
            return False
        growth, peak_growth = epoch.growth(), epoch.peak_growth()
        if growth is None or peak_growth is None:
            if seen < MOST_VARYING_BATCHES:
                return False
            growth, peak_growth = epoch.mean_growth(), 0
        if length is None and growth:
            return False
        if length is not None and growth:
            self._hold(seen, length, growth, max(peak_growth - growth, 0))
        shown = "" if length is None else f" of {length:,}"
        grows = "; what it collects on the device is extrapolated" if growth else ""
        self._assumptions.note(f"an evaluation was ended after {seen}{shown} batches{grows}")
        return True

    def release(self) -> None:
        """Free what stands for batches that were left out: the script does something else now."""
        self._held.clear()
        self.seen, self._ratio = 0, 1.0

    def enlarge(self, inputs: Any, out: Tensor) -> None:
        """Let a tensor that is made of all that was collected hold what is missing of it for as long as it lives."""
        if self.seen and isinstance(inputs, (list, tuple)) and len(inputs) >= self.seen:
            extra = [self._allocate(int((self._ratio - 1) * out.numel() * out.element_size()))]
            weakref.finalize(out.untyped_storage(), extra.clear)

    def _hold(self, seen: int, length: int, growth: int, transient: int) -> None:
        left = length - seen
        blocks = min(left, _MOST_BLOCKS)
        self._held += [self._allocate(growth * left // blocks) for _ in range(blocks)]
        self.seen, self._ratio = seen, length / seen
        if transient:
            self._allocate(transient * left)  # freed at once: a moment of the last batch


class EvaluationEpoch:
    """The memory after each batch of an evaluation, and the peak within it."""

    def __init__(self) -> None:
        self.held: list[int] = []
        self._peaks: list[int] = []

    def note(self, held_bytes: int, peak_bytes: int) -> None:
        """Note the figures of a batch."""
        self.held.append(held_bytes)
        self._peaks.append(max(peak_bytes, held_bytes))

    def growth(self) -> int | None:
        """Return the bytes that each batch leaves behind, None where they differ."""
        return _steady_growth(self.held)

    def peak_growth(self) -> int | None:
        """Return by how much the peak of each batch is above that of the one before, None where it differs."""
        return _steady_growth(self._peaks)

    def mean_growth(self) -> int:
        """Return the mean of what the last batches have left behind."""
        return max((self.held[-1] - self.held[len(self.held) // 2]) // (len(self.held) - len(self.held) // 2), 0)


def _steady_growth(values: Sequence[int]) -> int | None:
    """Return the slope of the last values if they are on a line."""
    last = values[-_STEADY:]
    slope = (last[-1] - last[0]) / (_STEADY - 1)
    allowed = max(_TOLERANCE * abs(slope) * _STEADY, 2**16)
    on_line = all(abs(value - last[0] - slope * index) <= allowed for index, value in enumerate(last))
    return max(round(slope), 0) if on_line else None
