"""Which phases of a script a run has seen, and which of them it has not reached.

A phase that was not reached is known by what the script made and never used (a loader, an optimizer), by what a library
was configured to do (a strategy of evaluation), and by places of the user's files that evaluate, generate or save.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from vramcast.virtual_gpu.cuda.script_source import ScriptSource
from vramcast.virtual_gpu.tracing.source_lines import place_now

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.run_record import RunRecord


class PhaseCoverage:
    """Which phases of a script have run."""

    def __init__(self, record: "RunRecord", source: ScriptSource) -> None:
        self._record = record
        self._source = source
        self._ran: set[int] = set()
        self._loaders: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()
        """Loaders that are alive, and where they were made."""
        self._iterated: set[int] = set()
        """Datasets whose loaders were iterated, by identity: libraries make new loaders for a dataset."""
        self._datasets: list[Any] = []
        self._optimizers: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()
        self.expected: list[Callable[[], str | None]] = []
        """Functions of libraries that return a phase which they were configured to run and have not run yet."""
        self.checkpoints = 0

    def ran(self, number: int) -> None:
        """Note that a marked place of the user's files has run."""
        self._ran.add(number)

    def made_loader(self, loader: Any) -> None:
        """Note a loader."""
        self._loaders[loader] = place_now()

    def iterated(self, loader: Any) -> None:
        """Note that a loader is iterated."""
        dataset = getattr(loader, "dataset", None)
        if id(dataset) not in self._iterated:
            self._iterated.add(id(dataset))
            self._datasets.append(dataset)  # so that no other dataset gets its identity

    def made_optimizer(self, optimizer: Any) -> None:
        """Note an optimizer."""
        self._optimizers[optimizer] = place_now()
        self._record.made_optimizers.add(optimizer)

    def missing(self, *, natural_end: bool = False, has_unmet: bool = False) -> tuple[str, ...]:
        """Return the phases that were not reached, each with a place.

        Args:
            natural_end: The script has come to its end with fewer iterations than its own: only what a condition on
                numbers decides may be missing, since other branches were not taken.
            has_unmet: There, a counter has not had all values that such conditions ask for.
        """
        phases = [*self._unstepped(), *filter(None, (expected() for expected in self.expected))]
        phases += [
            f"{mark.kind} ({mark.place})"
            for number, mark in self._source.reachable_marks()
            if number not in self._ran and (not natural_end or mark.is_opaque or (mark.is_counted and has_unmet))
        ]
        if not natural_end:
            phases += [
                f"a loader that was never iterated ({place or 'made by a library'})"
                for loader, place in list(self._loaders.items())
                if id(getattr(loader, "dataset", None)) not in self._iterated and place is not None
            ]
        return tuple(dict.fromkeys(phases))

    def _unstepped(self) -> Iterator[str]:
        stepped = self._record.optimizers
        if not stepped:
            return
        for optimizer, place in list(self._optimizers.items()):
            if id(optimizer) not in stepped and place is not None and getattr(optimizer, "param_groups", None):
                yield f"steps of {type(optimizer).__name__} ({place})"
