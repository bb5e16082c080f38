"""Renders docs/benchmark.md."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.field.rows import TITLES, UNSEEN_2024
from benchmarks.field.tables import OVERALL, Line, markdown_table

COMMAND = "VRAMCAST_DATA=DIR PYTHONPATH=.venvs/xmem python -m benchmarks.field --one-in {one_in}"
FINE_TUNING = Path(__file__).parent / "fine_tuning.md"
"""A section of its own: its rows are simulated by `vramcast evaluate`, in the environments of `make stacks`."""
PICTURES = {
    "field_errors.png": "Share of rows (measured by others) with at most a given relative error, by family.",
    "field_scatter.png": "Estimated against measured memory of every row; the grey line marks equality.",
    "field_unseen.png": "Real networks outside all training data: measured in 2024 by GPUMemNet's authors, their "
    "published estimates, and ours, which are simulated.",
}
ABSENT = (
    "The public measurements are missing: set `VRAMCAST_DATA` to their directory and run "
    "`python -m benchmarks.field` again.\n"
)

_HEAD = """\
# Comparison with the field

All estimators on the same rows, in one run. `{command}` writes this page, its
[CSV](benchmark.csv) and the pictures.

**The truth is measured**, by others on real GPUs (GPUMemNet, CARMA and AEGIS, E. Yousefzadeh-Asl-Miandoab et al., IT
University of Copenhagen, CC BY 4.0; xMem, J. Shi et al., MIT): maxima of nvidia-smi or NVML. **Estimates are made
without a GPU**; a column says whether an estimate is computed by a formula, simulated, or learned. *Published* marks
figures that other authors published about their own estimators.

Rows: the {tested:,} test rows of the split by configuration of the released checkpoint `universal`, and {unseen}
measurements of real networks outside all training data. Learned estimators were fitted to the {train:,} training rows
of the same split and selected on its {validation:,} validation rows: one network of each kind with a short training.
`universal` is the released checkpoint: the simulation with the errors of its calibration rows. xMem's Transformers were
traced with transformers {transformers}. MemTracker is slow: it estimated one row in {one_in}, {tracked} rows{failed}.

- *median, mean, p95*: relative error of the point estimate, over rows that fit. "Does not fit" for a row that fits
  counts as 100 %.
- *1, 2, 8 GB*: share of rows in the right bucket of 1000, 2000, 8000 MiB; "does not fit" is a bucket.
- *too low*: share of rows that take more than the upper edge of the predicted bucket of 1000 MiB.
- *over MiB*: the mean distance from the memory used up to that edge; negative if the edge is mostly too low.
- *CPU s*: CPU seconds for one job in a warm process, including the construction of its network; the median over three
  jobs of each family. Published seconds are for a batch on a GPU.

Not everything is blind: some rules of the virtual GPU were derived from GPUMemNet's rows, and its profile for timm was
calibrated on the even half of the networks; some rules were derived with both halves in sight
([virtual-gpu.md](virtual-gpu.md) lists them). The odd half and the real networks have their own tables. For timm,
FakeTensor's figures are the published ones; elsewhere they are an upper bound from the simulation.
"""


def render(lines: Sequence[Line], notes: Mapping[str, object]) -> str:
    """Return the page."""
    titles = {OVERALL: "All rows (mostly MLPs, which are the easiest)", **TITLES}
    parts = [_HEAD.format(command=COMMAND.format(**notes), **notes)]
    for part, title in titles.items():
        chosen = [line for line in lines if line.part == part]
        rows = max((line.rows or 0 for line in chosen), default=0)
        if rows:
            note = _NOTES.get(part, "")
            parts.append(f"## {title}\n\n{rows:,} rows, measured.\n\n{note}{markdown_table(chosen)}\n")
    parts.append(FINE_TUNING.read_text(encoding="utf-8"))
    parts += [f"## Pictures\n\n{_pictures()}"]
    return "\n".join(parts)


_NOTES = {
    UNSEEN_2024: "One line of the published table is left out, a job on two GPUs. With it, the published mean errors "
    "are 60 % (GPUMemNet), 45 % (FakeTensor, CNNs alone) and 65 % (Horus). FakeTensor's figures for Inception are for "
    "smaller images.\n\n",
}


def _pictures() -> str:
    return "\n\n".join(f"![{text}]({name})\n\n{text}" for name, text in PICTURES.items()) + "\n"
