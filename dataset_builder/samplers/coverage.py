"""How evenly a set of configurations covers a space: each factor, and each pair of factors."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import log

from dataset_builder.space import Assignment, Space


@dataclass(frozen=True)
class Cells:
    """How often each cell of a grid was met: the levels of a factor, or the pairs of levels of two."""

    names: tuple[str, ...]
    counts: tuple[int, ...]

    @property
    def covered(self) -> float:
        """Share of the cells that were met at least once."""
        return sum(count > 0 for count in self.counts) / len(self.counts)

    @property
    def evenness(self) -> float:
        """Entropy of the counts, 1 where all cells are met equally often."""
        total = sum(self.counts)
        if len(self.counts) == 1 or not total:
            return 1.0
        shares = [count / total for count in self.counts if count]
        return -sum(share * log(share) for share in shares) / log(len(self.counts)) + 0.0


@dataclass(frozen=True)
class Coverage:
    """Cells of every factor and of every pair."""

    rows: int
    factors: tuple[Cells, ...]
    pairs: tuple[Cells, ...]

    @property
    def pairs_covered(self) -> float:
        """Share of all pairs of levels that occur."""
        cells = sum(len(pair.counts) for pair in self.pairs)
        return sum(pair.covered * len(pair.counts) for pair in self.pairs) / cells if cells else 1.0


def coverage(space: Space, assignments: Iterable[Assignment]) -> Coverage:
    """Count levels and pairs of levels."""
    names = list(space.factors)
    bins = [[space.factors[name].bin(values[name], values) for name in names] for values in assignments]
    sizes = [space.factors[name].level_count for name in names]
    single = tuple(_cells(bins, names, sizes, (i,)) for i in range(len(names)))
    pairs = tuple(_cells(bins, names, sizes, pair) for pair in combinations(range(len(names)), 2))
    return Coverage(len(bins), single, pairs)


def _cells(
    bins: Sequence[Sequence[int]], names: Sequence[str], sizes: Sequence[int], columns: tuple[int, ...]
) -> Cells:
    met = Counter(tuple(row[i] for i in columns) for row in bins)
    grid: list[tuple[int, ...]] = [()]
    for column in columns:
        grid = [(*cell, level) for cell in grid for level in range(sizes[column])]
    return Cells(tuple(names[i] for i in columns), tuple(met[cell] for cell in grid))


def report(found: Coverage, most_pairs: int | None = None) -> str:
    """The coverage as a Markdown page: every factor, and every pair or the `most_pairs` that are covered worst."""
    worst = sorted(found.pairs, key=lambda pair: (pair.covered, pair.evenness))[:most_pairs]
    lines = [
        f"# Coverage of {found.rows} configurations",
        "",
        f"Pairs of levels that occur: {found.pairs_covered:.1%}. Evenness is 1 where all cells are met equally often.",
        "",
        "| factor | levels | counts | covered | evenness |",
        "| --- | --- | --- | --- | --- |",
        *(_line(cells, show_counts=True) for cells in found.factors),
        "",
        f"Pairs of factors, those covered worst first, {len(worst)} of {len(found.pairs)}:",
        "",
        "| pair | cells | covered | evenness |",
        "| --- | --- | --- | --- |",
        *(_line(cells, show_counts=False) for cells in worst),
    ]
    return "\n".join(lines) + "\n"


def _line(cells: Cells, *, show_counts: bool) -> str:
    counts = f" {' '.join(map(str, cells.counts))} |" if show_counts else ""
    return f"| {' x '.join(cells.names)} | {len(cells.counts)} |{counts} {cells.covered:.0%} | {cells.evenness:.3f} |"
