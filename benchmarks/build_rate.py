"""Rows a second of `vramcast build`, pinned to one core: `python -m benchmarks.build_rate`."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROWS = {"mlp": 2000, "cnn": 1000, "template": 1000, "transformer": 500}


def rows_a_second(family: str, rows: int) -> float:
    """Build rows in a new process on one core; the start of Python counts."""
    with tempfile.TemporaryDirectory() as out:
        words = [f"family={family}", f"n={rows}", "backend=static", "executor=serial", f"out={out}"]
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "dataset_builder", *words], check=True, capture_output=True)
        seconds = time.perf_counter() - start
        written = (Path(out) / "journal.jsonl").read_bytes().count(b'"type":"row"')
    if written != rows:
        raise RuntimeError(f"{family}: {written} rows written, {rows} asked for")
    return rows / seconds


def main() -> None:
    """Print a line for each family."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print("vramcast build backend=static executor=serial, one core, start of the process included")
    for family, rows in ROWS.items():
        print(f"  family={family} n={rows}: {rows_a_second(family, rows):,.0f} rows a second", flush=True)


if __name__ == "__main__":
    main()
