"""How evenly a set of configurations covers a space: each factor, and each pair of factors."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import log, prod

import numpy as np

from vramcast.dataset_builder.arrays.fields import IntArray
from vramcast.dataset_builder.space import Assignment, Space


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
    known = list(assignments)
    bins = {
        name: np.array([factor.bin(values[name], values) for values in known], dtype=np.int64)
        for name, factor in space.factors.items()
    }
    single = tuple(_cells(space, bins, (name,)) for name in bins)
    pairs = tuple(_cells(space, bins, pair) for pair in combinations(bins, 2))
    return Coverage(len(known), single, pairs)


def _cells(space: Space, bins: Mapping[str, IntArray], names: tuple[str, ...]) -> Cells:
    sizes = [space.factors[name].level_count for name in names]
    cells = np.ravel_multi_index([bins[name] for name in names], sizes)  # the last factor runs fastest
    return Cells(names, tuple(np.bincount(cells, minlength=prod(sizes)).tolist()))


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
