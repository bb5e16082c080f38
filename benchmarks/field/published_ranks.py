"""Published memory of one rank against the simulation: `python -m benchmarks.field.published_ranks --data DIRECTORY`.

The directory holds tables of torchtitan, fms-acceleration and litgpt that are not part of this repository. Rows with
kernels or libraries that are not simulated (torch.compile, float8, quantised bases, fused kernels) are left out and
counted, as are rows of fms-acceleration that were measured with another generation of transformers than the installed
one.
"""

import argparse
import csv
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.field.ranks.cases import Case, Record, figure_gib, simulated
from benchmarks.field.ranks.fms import fms_case
from benchmarks.field.ranks.litgpt import litgpt_case
from benchmarks.field.ranks.titan import torchtitan_case
from vramcast.virtual_gpu.replay import Replay

SOURCES: dict[str, Callable[[Record], Case | str]] = {
    "torchtitan.csv": torchtitan_case,
    "fms_acceleration.csv": fms_case,
    "litgpt_resource_tables.csv": litgpt_case,
}


def compared(path: Path, left_out: Counter[str]) -> Iterator[tuple[Case, float]]:
    """Yield each case of a table with its simulated figure; equal cases are simulated once and averaged."""
    cases: dict[Any, list[Case]] = {}
    with path.open(newline="") as lines:
        for record in csv.DictReader(lines):
            case = SOURCES[path.name](record)
            if isinstance(case, str):
                left_out[case] += 1
            else:
                cases.setdefault((case.key, case.metric), []).append(case)
    results: dict[Any, Replay] = {}
    for (key, metric), equal in cases.items():
        if key not in results:
            results[key] = simulated(equal[0])
        published = statistics.median(item.published_gib for item in equal)
        yield replace(equal[0], published_gib=published), figure_gib(results[key], metric)


def main() -> None:
    """Print each comparison, then the median and the 90th percentile of the errors of each source."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIRECTORY")
    parser.add_argument("--source", choices=[name.removesuffix(".csv") for name in SOURCES])
    arguments = parser.parse_args()
    for name in SOURCES:
        path = arguments.data / name
        if arguments.source in (None, path.stem):
            _print_source(path)


def _print_source(path: Path) -> None:
    print(path.name)
    if not path.exists():
        print("  not there")
        return
    errors, left_out = [], Counter[str]()
    for case, figure in compared(path, left_out):
        error = figure / case.published_gib - 1
        errors.append(abs(error))
        print(
            f"  {case.name:72} {case.metric:9} {case.published_gib:8.3f} {figure:8.3f} GiB {error:+8.2%}",
            flush=True,
        )
    if errors:
        high = sorted(errors)[min(int(0.9 * len(errors)), len(errors) - 1)]
        print(f"  {len(errors)} rows: median error {statistics.median(errors):.2%}, 90th percentile {high:.2%}")
    for reason, count in left_out.most_common():
        print(f"  left out: {count} rows, {reason}")


if __name__ == "__main__":
    main()
