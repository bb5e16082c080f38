"""Rows a second of `vramcast build`, pinned to one core: `python -m benchmarks.performance.build_rate`."""

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROWS = {"mlp": 2000, "cnn": 1000, "template": 1000, "transformer": 500}


def rates(family: str, rows: int) -> tuple[float, float]:
    """Rows a second, and a second of CPU time, of a new process on one core; the start of Python counts."""
    with tempfile.TemporaryDirectory() as out:
        words = [f"family={family}", f"n={rows}", "backend=static", "executor=serial", f"out={out}"]
        start, used = time.perf_counter(), _cpu_seconds()
        subprocess.run([sys.executable, "-m", "vramcast", "build", *words], check=True, capture_output=True)
        seconds, cpu_seconds = time.perf_counter() - start, _cpu_seconds() - used
        written = (Path(out) / "journal.jsonl").read_bytes().count(b'"type":"row"')
    if written != rows:
        raise RuntimeError(f"{family}: {written} rows written, {rows} asked for")
    return rows / seconds, rows / cpu_seconds


def _cpu_seconds() -> float:
    """What children have used so far: on a busy machine it says more than the clock."""
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


def main() -> None:
    """Print a line for each family."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print("vramcast build backend=static executor=serial, one core, start of the process included")
    for family, rows in ROWS.items():
        wall, cpu = rates(family, rows)
        print(f"  family={family} n={rows}: {wall:,.0f} rows a second, {cpu:,.0f} a second of CPU time", flush=True)


if __name__ == "__main__":
    main()
