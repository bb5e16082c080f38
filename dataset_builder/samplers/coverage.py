"""Counts how evenly configurations cover a space: each factor and each pair of factors."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import log, prod

import numpy as np

from vramcast.dataset_builder.arrays.fields import IntArray
from vramcast.dataset_builder.space import Assignment, Space


@dataclass(frozen=True)
class Cells:
    """Counts of the levels of one factor, or of the pairs of levels of two factors."""

    names: tuple[str, ...]
    counts: tuple[int, ...]

    @property
    def covered(self) -> float:
        """Share of the cells that occur at least once."""
        return sum(count > 0 for count in self.counts) / len(self.counts)

    @property
    def evenness(self) -> float:
        """Normalised entropy of the counts: 1 if all cells occur equally often."""
        total = sum(self.counts)
        if len(self.counts) == 1 or not total:
            return 1.0
        shares = [count / total for count in self.counts if count]
        return -sum(share * log(share) for share in shares) / log(len(self.counts)) + 0.0


@dataclass(frozen=True)
class Coverage:
    """Counts for every factor and every pair of factors."""

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
    configurations = list(assignments)
    bins = {
        name: np.array([factor.bin(values[name], values) for values in configurations], dtype=np.int64)
        for name, factor in space.factors.items()
    }
    single = tuple(_cells(space, bins, (name,)) for name in bins)
    pairs = tuple(_cells(space, bins, pair) for pair in combinations(bins, 2))
    return Coverage(len(configurations), single, pairs)


def _cells(space: Space, bins: Mapping[str, IntArray], names: tuple[str, ...]) -> Cells:
    sizes = [space.factors[name].level_count for name in names]
    cells = np.ravel_multi_index([bins[name] for name in names], sizes)  # the last factor runs fastest
    return Cells(names, tuple(np.bincount(cells, minlength=prod(sizes)).tolist()))


def coverage_report(result: Coverage, sampler: str, max_pairs: int | None = None) -> str:
    """Return the coverage as Markdown: the sampler, every factor, and all pairs or the `max_pairs` least covered."""
    worst = sorted(result.pairs, key=lambda pair: (pair.covered, pair.evenness))[:max_pairs]
    lines = [
        f"# Coverage of {result.rows} configurations",
        "",
        f"Pairs of levels that occur: {result.pairs_covered:.1%}. Evenness is 1 if all cells occur equally often.",
        "",
        f"Sampler: {sampler}.",
        "",
        "| factor | levels | counts | covered | evenness |",
        "| --- | --- | --- | --- | --- |",
        *(_line(cells, show_counts=True) for cells in result.factors),
        "",
        f"Pairs of factors, the least covered first, {len(worst)} of {len(result.pairs)}:",
        "",
        "| pair | cells | covered | evenness |",
        "| --- | --- | --- | --- |",
        *(_line(cells, show_counts=False) for cells in worst),
    ]
    return "\n".join(lines) + "\n"


def _line(cells: Cells, *, show_counts: bool) -> str:
    counts = f" {' '.join(map(str, cells.counts))} |" if show_counts else ""
    return f"| {' x '.join(cells.names)} | {len(cells.counts)} |{counts} {cells.covered:.0%} | {cells.evenness:.3f} |"
