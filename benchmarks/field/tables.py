"""From answers to the lines of the tables, and from lines to Markdown and CSV."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from vramcast.models._base import Estimator
from vramcast.models.comparison import answers_of
from vramcast.models.example import Example
from vramcast.models.labels import Buckets
from vramcast.models.metrics import Answers, Score, score
from vramcast.virtual_gpu.sizes import MIB

WIDTHS_MIB = (1000, 2000, 8000)
"""Of the buckets: GPUMemNet's for MLPs, twice that, and its for CNNs and Transformers."""
OVERALL = "overall"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One estimator on one part of the rows."""

    part: str
    estimator: str
    group: str
    """'ours', 'field' or 'published'."""
    figure: str
    """What kind of figure its estimate is."""
    rows: int | None
    median_error: float | None = None
    mean_error: float | None = None
    p95_error: float | None = None
    accuracy_1000: float | None = None
    accuracy_2000: float | None = None
    accuracy_8000: float | None = None
    too_low: float | None = None
    over_reservation_mib: float | None = None
    seconds: float | None = None
    needs_gpu: str = "no"


@dataclass(frozen=True)
class Said:
    """What an estimator says of all examples, at each width."""

    by_width: Mapping[int, Answers]
    known: NDArray[np.bool_]
    """Which examples it was asked about."""

    @property
    def point_bytes(self) -> NDArray[np.float64]:
        """Not a number where it was not asked."""
        return np.where(self.known, _full(self.by_width[WIDTHS_MIB[0]].point_bytes, self.known), np.nan)


def _full(values: NDArray[np.float64], known: NDArray[np.bool_]) -> NDArray[np.float64]:
    found = np.full(len(known), np.nan)
    found[known] = values
    return found


def ask(estimator: Estimator, examples: Sequence[Example], known: NDArray[np.bool_]) -> Said:
    """Ask an estimator about the examples that it can be asked about."""
    chosen = [example for example, there in zip(examples, known, strict=True) if there]
    card_bytes = max(example.capacity_bytes for example in examples)
    return Said({width: answers_of(estimator, chosen, Buckets(width * MIB, card_bytes)) for width in WIDTHS_MIB}, known)


def line_of(said: Said, mask: NDArray[np.bool_], template: Line, narrowest_mib: int = 0) -> Line | None:
    """The figures of one part of the examples; None where the estimator was asked about none of them.

    A scheduler is taken to set aside the upper edge of the bucket of 1000 MiB that it is told.
    """
    inside = mask[said.known]
    if not inside.any():
        return None
    scores = {width: _score(answers, inside) for width, answers in said.by_width.items()}
    first = scores[WIDTHS_MIB[0]]
    accuracies = {f"accuracy_{width}": found.accuracy for width, found in scores.items() if width >= narrowest_mib}
    return replace(
        template,
        rows=first.rows,
        median_error=first.median_relative_error,
        mean_error=first.mean_relative_error,
        p95_error=first.p95_relative_error,
        too_low=first.too_low,
        over_reservation_mib=first.over_reservation_mib,
        **accuracies,
    )


def _score(answers: Answers, inside: NDArray[np.bool_]) -> Score:
    return score(replace(answers, family=np.where(inside, "in", "out")).of_family("in"))


def to_frame(lines: Iterable[Line]) -> pd.DataFrame:
    """The lines as a table, which is the CSV."""
    return pd.DataFrame([asdict(line) for line in lines], columns=[item.name for item in fields(Line)])


HEADS = (
    "estimator", "its figure is", "rows", "median", "mean", "p95", "1 GB", "2 GB", "8 GB", "too low", "over MiB",
    "CPU s", "needs a GPU",
)  # fmt: skip


def markdown_table(lines: Sequence[Line]) -> str:
    """A table for people; what is best in a column is bold."""
    best = _best(lines)
    most = max((line.rows or 0 for line in lines), default=0)
    rows = [_cells(line, best, most) for line in lines]
    marks = ["---", "---", *["---:"] * (len(HEADS) - 3), "---"]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (HEADS, marks, *rows))


_HIGHER = ("accuracy_1000", "accuracy_2000", "accuracy_8000")
_LOWER = ("median_error", "mean_error", "p95_error", "too_low")


def _best(lines: Sequence[Line]) -> dict[str, str]:
    """The best cell of each column as it is shown, among those that were asked about all rows."""
    most = max((line.rows or 0 for line in lines), default=0)
    found = {}
    for name, choose in [*((name, max) for name in _HIGHER), *((name, min) for name in _LOWER)]:
        values = [getattr(line, name) for line in lines if line.rows == most and getattr(line, name) is not None]
        if values:
            found[name] = _shown(name, choose(values))
    return found


def _cells(line: Line, best: Mapping[str, str], most: int) -> list[str]:
    def cell(name: str) -> str:
        shown = _shown(name, getattr(line, name))
        return f"**{shown}**" if best.get(name) == shown and line.rows == most else shown

    rows = "" if line.rows is None else f"{line.rows:,}"
    seconds = "" if line.seconds is None else f"{line.seconds:.2g}"
    figures = [
        cell(name) for name in ("median_error", "mean_error", "p95_error", *_HIGHER, "too_low", "over_reservation_mib")
    ]
    return [line.estimator, line.figure, rows, *figures, seconds, line.needs_gpu]


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name.startswith("accuracy"):
        return f"{value:.3f}"
    if name.endswith("_mib"):
        return f"{value:,.0f}"
    return f"{value:.2%}" if value < 0.1 else f"{value:.0%}"
