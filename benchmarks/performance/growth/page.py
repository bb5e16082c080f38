"""The page of growth: a table for each thing that grows, and the fitted exponents."""

import pandas as pd

from benchmarks.performance.growth.fitting import fit_growth
from benchmarks.performance.growth.measuring import BUILT_ROWS, figures_of

COMMAND = "python -m benchmarks.performance.growth"
SHOWN = {
    "layers": ("Layers", "Half of them Linear, half ReLU, 64 wide, batch 8.", ("seconds", "grown_mib", "peak_mib")),
    "parameters": ("Parameters", "Ten square Linear layers, batch 8.", ("seconds", "grown_mib", "peak_mib")),
    "batch": ("Batch size", "ResNet-50, images of 224 x 224.", ("seconds", "grown_mib", "peak_mib")),
    "cores": (
        "Cores of a build",
        f"`vramcast build family=cnn n={BUILT_ROWS}` on the virtual GPU, a worker for each core, the start included.",
        ("seconds", "rows_a_second"),
    ),
    "connections": (
        "Load of the service",
        "`POST /v1/classify` about networks that it has met, over so many connections at once, each of which asks "
        "again as soon as it is answered. Client and service share the machine.",
        ("p50_ms", "p99_ms", "requests_a_second"),
    ),
}
"""By kind: title, what is measured, and the figures."""
TITLES = {
    "seconds": "CPU s", "grown_mib": "memory of the trace MiB", "peak_mib": "peak of the process MiB",
    "rows_a_second": "rows a second", "p50_ms": "p50 ms",
    "p99_ms": "p99 ms", "requests_a_second": "requests a second",
}  # fmt: skip

_HEAD = f"""\
# How cost grows

`{COMMAND}` makes this page and the picture. Timings of this program on a CPU of two cores, no GPU; each figure comes
from fresh processes. A trace is what the virtual GPU makes of a job: two training steps and copies of them. The last
line of a table is the exponent p of the law *a + b x^p* that fits best, with what is there from the start in *a*.

![How cost grows](growth.png)
"""


def render(table: pd.DataFrame) -> str:
    """The whole page."""
    parts = [_HEAD]
    for kind, (title, text, figures) in SHOWN.items():
        if (table["kind"] == kind).any():
            parts.append(f"## {title}\n\n{text}\n\n{_table(table, kind, figures)}\n")
    return "\n".join(parts)


def _table(table: pd.DataFrame, kind: str, figures: tuple[str, ...]) -> str:
    columns = {figure: figures_of(table, kind, figure) for figure in figures}
    sizes = next(iter(columns.values()))[0]
    titles = {**TITLES, "seconds": "s"} if kind == "cores" else TITLES
    lines = [[kind, *(titles[figure] for figure in figures)], ["---:"] * (len(figures) + 1)]
    lines += [
        [f"{size:,.0f}", *(_shown(columns[figure][1][index]) for figure in figures)] for index, size in enumerate(sizes)
    ]
    if len(sizes) > 1:
        lines.append(["*exponent*", *(f"{fit_growth(*columns[figure]).exponent:.2f}" for figure in figures)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
