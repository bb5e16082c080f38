"""`python -m benchmarks.field`: write the marked parts of docs/accuracy.md, its CSV and its pictures."""

import argparse
import os
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from benchmarks.field.estimators import Entry, fit_all, in_order, ready, supported_by, unfitted
from benchmarks.field.page import ABSENT, MAKER, parts
from benchmarks.field.pictures import draw_all
from benchmarks.field.published import fold_lines
from benchmarks.field.rows import TITLES, UNSEEN, Field, load_field
from benchmarks.field.tables import OVERALL, Line, Predictions, line_of, predict, to_frame
from benchmarks.field.timing import seconds_of
from benchmarks.field.tracked import in_sample, tracked_figures
from benchmarks.page import write_part
from vramcast.errors import UserError
from vramcast.virtual_gpu.allocator.sizes import MIB

ONE_IN = 4
"""MemTracker estimates one row in this many."""


def main() -> int:
    """Write the parts of the page. Without the measurements, print how to get them and change nothing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.field", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("VRAMCAST_DATA", "data")))
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="the directory of page, CSV and pictures")
    parser.add_argument("--cache", help="directory of simulations; default: the user's cache")
    parser.add_argument("--results", type=Path, default=Path("runs/field"), help="cached results, reused by later runs")
    parser.add_argument("--one-in", type=int, default=ONE_IN, help="MemTracker estimates one row in this many")
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
    to_frame(lines).to_csv(arguments.docs / "accuracy.csv", index=False, float_format="%.6g", lineterminator="\n")
    for name, text in parts(lines, notes).items():
        write_part(arguments.docs / "accuracy.md", MAKER, name, text)
    arguments.results.mkdir(parents=True, exist_ok=True)
    points.to_csv(arguments.results / "points.csv", index=False)
    draw_all(points, arguments.docs)
    print(f"accuracy.md, accuracy.csv and pictures are in {arguments.docs}")
    return 0


def compute(arguments: argparse.Namespace) -> tuple[list[Line], pd.DataFrame, dict[str, object]]:
    """Return the lines of the tables, the points of the pictures, and the counts that the page quotes."""
    field = load_field(arguments.data, arguments.cache, arguments.workers)
    specs = [item.spec for item in field.tested if in_sample(item.spec, arguments.one_in)]
    tracked = tracked_figures(specs, arguments.results, arguments.workers)
    tracked_mib = {item["id"]: item["mib"] for item in tracked if "mib" in item}
    entries = in_order([*ready(arguments.data, tracked_mib), *fit_all(unfitted(), field.train, field.validation)])
    entries = [entry for entry in entries if supported_by(entry, field).any()]
    seconds = seconds_of(entries, field.tested)
    predictions = {
        entry.title: predict(entry.estimator, field.examples, supported_by(entry, field)) for entry in entries
    }
    lines = [line for entry in entries for line in lines_of(entry, predictions[entry.title], field, seconds)]
    lines += fold_lines()
    failed = sum("mib" not in item for item in tracked)
    counts = field.counts()
    notes = {
        "tested": len(field.tested) - counts[UNSEEN], "unseen": counts[UNSEEN], "train": len(field.train),
        "validation": len(field.validation), "one_in": arguments.one_in,
        "tracked": sum(item.spec.id in tracked_mib for item in field.tested),
        "failed": f"; it failed on {failed} networks" if failed else "", "transformers": version("transformers"),
    }  # fmt: skip
    return lines, points_of(entries, predictions, field), notes


def lines_of(entry: Entry, predictions: Predictions, field: Field, seconds: dict[str, float]) -> list[Line]:
    """Return one line for each part of the rows that the estimator supports."""
    lines = []
    for part in (OVERALL, *TITLES) if entry.only is None else (entry.only,):
        template = Line(
            part=part, estimator=entry.title, group=entry.group, figure=entry.figure, rows=None,
            seconds=seconds.get(entry.title), needs_gpu=entry.needs_gpu,
        )  # fmt: skip
        mask = np.array([part == OVERALL or part in item.parts for item in field.tested])
        line = line_of(predictions, mask, template, entry.narrowest_mib)
        lines += [line] if line else []
    return lines


def points_of(entries: list[Entry], predictions: dict[str, Predictions], field: Field) -> pd.DataFrame:
    """Return one line per row and estimator; the pictures are drawn from them."""
    rows = pd.DataFrame(
        {
            "name": [item.name for item in field.tested],
            "batch": [item.spec.training.batch_size for item in field.tested],
            "family": [item.family for item in field.tested],
            "shown": [" + ".join(item.parts) for item in field.tested],
            "measured_mib": [item.example.measured.used_bytes / MIB for item in field.tested],
            "fits": [item.example.measured.fits for item in field.tested],
            "capacity_mib": [item.example.capacity_bytes / MIB for item in field.tested],
        }
    )
    parts = []
    for entry in entries:
        estimates = predictions[entry.title].point_bytes / MIB
        part = rows.assign(estimator=entry.title, group=entry.group, estimate_mib=estimates)
        parts.append(part[predictions[entry.title].supported])
    return pd.concat(parts, ignore_index=True)


if __name__ == "__main__":
    sys.exit(main())
