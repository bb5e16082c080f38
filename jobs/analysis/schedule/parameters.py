"""The shapes of each layer's trainable parameters, which a table lists for the whole network."""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from math import prod

from vramcast.jobs.spec import LayerTable

Shape = tuple[int, ...]
_LONGEST_RUN = 6
"""Parameters of one layer: an attention has four, a layer of a recurrent network as many."""
_MOST_TRIED = 8
"""Runs that are tried for a layer, so that the time grows with the number of layers alone."""
_MOST_PARAMETERS = 64
"""Of one layer, such as a recurrent network with several layers and directions."""
_NOWHERE: deque[int] = deque()


def parameter_shapes(table: LayerTable) -> list[tuple[Shape, ...]]:
    """Return the shapes by layer: runs of the table's shapes with as many elements as the layer has.

    A layer without such a run has one parameter of the same size.
    """
    return _Runs(table.trainable_shapes).of(table)


class _Runs:
    """Runs of shapes by the sum of their elements."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self.shapes = shapes
        self.sizes = [prod(shape) for shape in shapes]
        self.used = [False] * len(shapes)
        self.starts: dict[int, deque[int]] = {}
        for start in range(len(shapes)):
            total = 0
            for size in self.sizes[start : start + _LONGEST_RUN]:
                total += size
                self.starts.setdefault(total, deque()).append(start)

    def of(self, table: LayerTable) -> list[tuple[Shape, ...]]:
        """Return the shapes by layer. Norms come last: a bias and a part of a norm are as large as a norm."""
        result: list[tuple[Shape, ...]] = [()] * len(table.layers)
        for norms in (False, True):
            at = 0
            for place, record in enumerate(table.layers):
                wanted = record.parameters if record.trainable is None else record.trainable
                if not wanted or ("norm" in record.kind.lower()) is not norms:
                    continue
                run = self._run(wanted, at, _suits(record.kind))
                result[place] = ((wanted,),) if run is None else tuple(self.shapes[slice(*run)])
                if run is not None:
                    start, at = run
                    self.used[start:at] = [True] * (at - start)
        return result

    def _run(self, wanted: int, at: int, suits: Callable[[Shape], bool]) -> tuple[int, int] | None:
        """Return an unused run with a sum that suits a layer: the next one if it fits, else one of the first."""
        possible = self.starts.get(wanted, _NOWHERE)
        while possible and self.used[possible[0]]:
            possible.popleft()
        for start in (at, *islice(possible, _MOST_TRIED)):
            end = self._end(start, wanted)
            if end is not None and suits(self.shapes[start]):
                return start, end
        return None

    def _end(self, start: int, wanted: int) -> int | None:
        """Return where the run from a start ends that has a sum, None if there is none."""
        end, total = start, 0
        last = min(start + _MOST_PARAMETERS, len(self.sizes))
        while total < wanted and end < last and not self.used[end]:
            total += self.sizes[end]
            end += 1
        return end if total == wanted else None


def _suits(kind: str) -> Callable[[Shape], bool]:
    """Return whether a shape may be the first of a layer's parameters."""
    name = kind.lower()
    if "norm" in name:
        return lambda shape: len(shape) == 1
    if "conv" in name and name != "conv1d":
        return lambda shape: len(shape) > 2
    return lambda shape: True
