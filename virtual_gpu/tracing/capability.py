"""Compute capabilities that record the decisions made by them, to tell for which devices a trace holds."""

from typing import Any

_COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")


def _recorded(name: str) -> Any:
    def compare(self: "RecordedCapability", other: float) -> Any:
        outcome = getattr(float, name)(self, other)
        self.decisions[name, float(other)] = outcome
        return outcome

    return compare


class RecordedCapability(float):
    """A compute capability that records its comparisons: a trace holds for all devices on which they end alike."""

    decisions: dict[tuple[str, float], bool]

    def __new__(cls, value: float) -> "RecordedCapability":
        """Make a capability without decisions."""
        made = super().__new__(cls, value)
        made.decisions = {}
        return made

    __lt__, __le__, __gt__, __ge__, __eq__, __ne__ = map(_recorded, _COMPARISONS)
    __hash__ = float.__hash__

    @property
    def compared(self) -> bool:
        """Return True if any decision was made by it."""
        return bool(self.decisions)

    def decides_alike(self, other: float) -> bool:
        """Return True if another capability would have led to the same decisions."""
        return all(
            getattr(float, name)(float(other), value) is outcome for (name, value), outcome in self.decisions.items()
        )
