"""Renders docs/growth.md."""

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
        f"`vramcast build family=cnn n={BUILT_ROWS}` on the virtual GPU, one worker per core, including start-up.",
        ("seconds", "rows_a_second"),
    ),
    "connections": (
        "Load of the service",
        "`POST /v1/classify` for networks in its cache, over several connections at once, each repeating without "
        "pause. Client and service share the machine.",
        ("p50_ms", "p99_ms", "requests_a_second"),
    ),
}
"""Title, description and figures by kind."""
TITLES = {
    "seconds": "CPU s", "grown_mib": "memory of the trace MiB", "peak_mib": "peak of the process MiB",
    "rows_a_second": "rows per second", "p50_ms": "p50 ms",
    "p99_ms": "p99 ms", "requests_a_second": "requests per second",
}  # fmt: skip

_HEAD = f"""\
# How cost grows

`{COMMAND}` writes this page and its picture. All timings are of vramcast itself on a CPU with two cores, without a GPU,
each in new processes. A trace covers two training steps and their repetitions. The last line of each table is the
exponent p of the best fit *a + b x^p*; *a* is the fixed cost.

![How cost grows](growth.png)
"""


def render(table: pd.DataFrame) -> str:
    """Return the page."""
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
        [f"{size:,.0f}", *(_formatted(columns[figure][1][index]) for figure in figures)]
        for index, size in enumerate(sizes)
    ]
    if len(sizes) > 1:
        lines.append(["*exponent*", *(f"{fit_growth(*columns[figure]).exponent:.2f}" for figure in figures)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _formatted(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
