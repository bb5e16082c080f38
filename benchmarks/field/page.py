"""The page: tables with what a reader must know of them."""

from collections.abc import Mapping, Sequence

from benchmarks.field.rows import TITLES, UNSEEN_2024
from benchmarks.field.tables import OVERALL, Line, markdown_table

COMMAND = "VRAMCAST_DATA=DIR python -m benchmarks.field --one-in {one_in}"
PICTURES = {
    "field_errors.png": "Share of rows (measured by others) that an estimate is at least so near to, family by family.",
    "field_scatter.png": "Estimated against measured memory of every row; the grey line is where both are equal.",
    "field_unseen.png": "Real networks that nothing was trained on: measured in 2024 by GPUMemNet's authors, their "
    "published bars, and ours, which are simulated, then learned.",
}
ABSENT = (
    "The public measurements are not here: set `VRAMCAST_DATA` to their directory, and run "
    "`python -m benchmarks.field` again.\n"
)

_HEAD = """\
# The field

Every estimator on the same rows, in one run. `{command}` makes this page, its
[CSV](benchmark.csv) and the pictures.

**Truth is measured**, by others on real cards (GPUMemNet, CARMA and AEGIS, E. Yousefzadeh-Asl-Miandoab et al., IT
University of Copenhagen, CC BY 4.0): maxima of nvidia-smi. **Estimates are made here without a GPU**; a column says
whether they are computed by a formula, simulated, or learned. What is marked *published* are figures of others about
their own estimators, cited.

Rows: the {tested:,} test rows of the split by configuration that the checkpoint `universal` was released with, and
{unseen} figures of real networks that nothing was trained on. Whatever learns here was fitted to the {train:,}
training rows of the same split and chosen on its {validation:,} validation rows, one network of each kind with a short
training; `universal` is the released ensemble. MemTracker is slow, and was asked about one row in
{one_in}: {tracked} rows{failed}.

- *median, mean, p95*: relative error of the point estimate, over rows that fit; "does not fit", said of one that does,
  counts as 100 %.
- *1, 2, 8 GB*: share of rows whose bucket of 1000, 2000, 8000 MiB is right; "does not fit" is a bucket.
- *too low*: share of rows that take more than the upper edge of the bucket of 1000 MiB that is told.
- *over MiB*: how far that edge is above what is used, in the mean; below zero, it is mostly too low.
- *CPU s*: seconds of CPU for one job, the construction of its network included, in a process that is up; the median
  over three jobs of each family. Published seconds are those of a batch on a GPU.

What is not blind: rules of the virtual GPU were read off some of GPUMemNet's rows, and its profile for timm was
calibrated on the even half of the networks ([virtual-gpu.md](virtual-gpu.md) says which), some rules with both in
sight. The odd half and the real networks have tables of their own. FakeTensor's figures are the published ones for
timm; elsewhere they are a bound from above, taken from the simulation.
"""


def render(lines: Sequence[Line], notes: Mapping[str, object]) -> str:
    """The whole page."""
    titles = {OVERALL: "All rows (most of them are MLPs, which are the easiest)", **TITLES}
    parts = [_HEAD.format(command=COMMAND.format(**notes), **notes)]
    for part, title in titles.items():
        chosen = [line for line in lines if line.part == part]
        rows = max((line.rows or 0 for line in chosen), default=0)
        if rows:
            noted = _NOTES.get(part, "")
            parts.append(f"## {title}\n\n{rows:,} rows, measured.\n\n{noted}{markdown_table(chosen)}\n")
    parts += [f"## Pictures\n\n{_pictures()}"]
    return "\n".join(parts)


_NOTES = {
    UNSEEN_2024: "One line of the published table is left out, a job of two GPUs. With it, the published mean errors "
    "are 60 % (GPUMemNet), 45 % (FakeTensor, CNNs alone) and 65 % (Horus); FakeTensor's figures of Inception are those "
    "of smaller images.\n\n",
}


def _pictures() -> str:
    return "\n\n".join(f"![{text}]({name})\n\n{text}" for name, text in PICTURES.items()) + "\n"
