"""Renders the parts of docs/accuracy.md that the comparison with the field makes."""

from collections.abc import Mapping, Sequence

from benchmarks.field.rows import BLIND_TIMM, UNSEEN, UNSEEN_2024
from benchmarks.field.tables import OVERALL, Line, error_table

MAKER = "field"
"""The command as the marks of the page name it."""
ABSENT = (
    "The public measurements are missing: set `VRAMCAST_DATA` to their directory and run "
    "`python -m benchmarks.field` again.\n"
)
COLUMNS = {
    OVERALL: "all", "mlp": "MLPs", "cnn": "CNNs", "transformer": "Transformers", BLIND_TIMM: "timm, odd half",
    "hf": "xMem's Transformers", "torchvision": "xMem's CNNs", UNSEEN: "real networks", UNSEEN_2024: "real, 2024",
}  # fmt: skip
"""The parts of the rows that the page shows, and their titles; the CSV has all of them."""

_ROWS = """\
The {tested:,} test rows of the split of the released checkpoint `universal`, and {unseen} measurements of real
networks outside all data. Learned estimators were fitted to the {train:,} training rows of the same split and
selected on its {validation:,} validation rows. xMem's Transformers were traced with transformers {transformers}.
MemTracker is slow: it estimated one row in {one_in}, {tracked} rows{failed}."""


def parts(lines: Sequence[Line], notes: Mapping[str, object]) -> dict[str, str]:
    """Return the text of each marked part of the page."""
    return {"rows": _ROWS.format(**notes), "mean error": error_table(lines, COLUMNS)}
