"""Assumptions that a run rests on: values and shapes that only a real GPU would know, with the lines that read them."""

from dataclasses import dataclass

from vramcast.virtual_gpu.tracing.source_lines import place_now


@dataclass(frozen=True)
class Assumption:
    """One phrase, the line of the user's code that it holds for (None: no line of theirs), and how often."""

    phrase: str
    place: str | None
    count: int

    def __str__(self) -> str:
        times = f", {self.count} times" if self.count > 1 else ""
        return f"{self.phrase} (at {self.place}{times})" if self.place else f"{self.phrase}{times}"


class Assumptions:
    """Counts assumptions by phrase and line."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str | None], int] = {}

    def note(self, phrase: str) -> None:
        """Record that the line that is running rests on an assumption."""
        key = (phrase, place_now())
        self._counts[key] = self._counts.get(key, 0) + 1

    def note_once(self, phrase: str) -> None:
        """Record an assumption that holds for the whole run, without a line."""
        self._counts.setdefault((phrase, None), 1)

    def all(self) -> tuple[Assumption, ...]:
        """Return all of them in the order in which they were first made."""
        return tuple(Assumption(phrase, place, count) for (phrase, place), count in self._counts.items())
