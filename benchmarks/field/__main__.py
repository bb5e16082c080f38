"""`python -m benchmarks.field`: the tables, their CSV and the pictures, in one run."""

import argparse
import os
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from benchmarks.field.estimators import Entry, fit_all, given, in_order, known_of, unfitted
from benchmarks.field.page import ABSENT, render
from benchmarks.field.pictures import draw_all
from benchmarks.field.published import fold_lines
from benchmarks.field.rows import TITLES, UNSEEN, Field, load_field
from benchmarks.field.tables import OVERALL, Line, Said, ask, line_of, to_frame
from benchmarks.field.timing import seconds_of
from benchmarks.field.tracked import in_sample, tracked_figures
from vramcast.errors import UserError
from vramcast.virtual_gpu.sizes import MIB

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
ONE_IN = 4
"""Rows that MemTracker is asked about."""


def main() -> int:
    """Write the page; where the measurements are absent, say so and leave it as it is."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.field", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("VRAMCAST_DATA", DATA)))
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="where page, CSV and pictures go")
    parser.add_argument("--cache", default="runs/simulations")
    parser.add_argument("--kept", type=Path, default=Path("runs/field"), help="for what the next run need not do again")
    parser.add_argument("--one-in", type=int, default=ONE_IN, help="rows that MemTracker is asked about")
    parser.add_argument("--workers", type=int, default=min(2, len(os.sched_getaffinity(0))))
    arguments = parser.parse_args()
    if not arguments.data.is_dir():
        print(ABSENT, end="")
        return 0
    torch.set_num_threads(1)
    try:
        lines, points, notes = compute(arguments)
    except UserError as error:
        print(f"benchmarks.field: {error}", file=sys.stderr)
        return 2
    arguments.docs.mkdir(parents=True, exist_ok=True)
    to_frame(lines).to_csv(arguments.docs / "benchmark.csv", index=False, float_format="%.6g", lineterminator="\n")
    (arguments.docs / "benchmark.md").write_text(render(lines, notes), encoding="utf-8")
    arguments.kept.mkdir(parents=True, exist_ok=True)
    points.to_csv(arguments.kept / "points.csv", index=False)
    draw_all(points, arguments.docs)
    print(f"benchmark.md, benchmark.csv and pictures are in {arguments.docs}")
    return 0


def compute(arguments: argparse.Namespace) -> tuple[list[Line], pd.DataFrame, dict[str, object]]:
    """The lines of the tables, the points of the pictures, and what the page says of the run."""
    field = load_field(arguments.data, arguments.cache, arguments.workers)
    specs = [item.spec for item in field.asked if in_sample(item.spec, arguments.one_in)]
    tracked = tracked_figures(specs, arguments.kept, arguments.workers)
    tracked_mib = {item["id"]: item["mib"] for item in tracked if "mib" in item}
    entries = in_order([*given(arguments.data, tracked_mib), *fit_all(unfitted(), field.train, field.validation)])
    entries = [entry for entry in entries if known_of(entry, field).any()]
    seconds = seconds_of(entries, field.asked)
    said = {entry.title: ask(entry.estimator, field.examples, known_of(entry, field)) for entry in entries}
    lines = [line for entry in entries for line in lines_of(entry, said[entry.title], field, seconds)] + fold_lines()
    failed = sum("mib" not in item for item in tracked)
    counts = field.counts()
    notes = {
        "tested": len(field.asked) - counts[UNSEEN], "unseen": counts[UNSEEN], "train": len(field.train),
        "validation": len(field.validation), "one_in": arguments.one_in,
        "tracked": sum(item.spec.id in tracked_mib for item in field.asked),
        "failed": f"; it failed on {failed} networks" if failed else "",
    }  # fmt: skip
    return lines, points_of(entries, said, field), notes


def lines_of(entry: Entry, said: Said, field: Field, seconds: dict[str, float]) -> list[Line]:
    """One line for each part that the estimator was asked about."""
    found = []
    for part in (OVERALL, *TITLES) if entry.only is None else (entry.only,):
        template = Line(
            part=part, estimator=entry.title, group=entry.group, figure=entry.figure, rows=None,
            seconds=seconds.get(entry.title), needs_gpu=entry.needs_gpu,
        )  # fmt: skip
        mask = np.array([part == OVERALL or part in item.parts for item in field.asked])
        line = line_of(said, mask, template, entry.narrowest_mib)
        found += [line] if line else []
    return found


def points_of(entries: list[Entry], said: dict[str, Said], field: Field) -> pd.DataFrame:
    """One line for each row and estimator: what the pictures are drawn from."""
    rows = pd.DataFrame(
        {
            "name": [item.name for item in field.asked],
            "batch": [item.spec.training.batch_size for item in field.asked],
            "family": [item.family for item in field.asked],
            "shown": [" + ".join(item.parts) for item in field.asked],
            "measured_mib": [item.example.measured.used_bytes / MIB for item in field.asked],
            "fits": [item.example.measured.fits for item in field.asked],
            "card_mib": [item.example.capacity_bytes / MIB for item in field.asked],
        }
    )
    parts = []
    for entry in entries:
        estimates = said[entry.title].point_bytes / MIB
        part = rows.assign(estimator=entry.title, group=entry.group, estimate_mib=estimates)
        parts.append(part[said[entry.title].known])
    return pd.concat(parts, ignore_index=True)


if __name__ == "__main__":
    sys.exit(main())
