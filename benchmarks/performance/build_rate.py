"""Rows per second of `vramcast build` on one core: `python -m benchmarks.performance.build_rate`."""

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROWS = {"mlp": 2000, "cnn": 1000, "template": 1000, "transformer": 500}


def rates(family: str, rows: int) -> tuple[float, float]:
    """Return rows per second and per CPU second of a new process, including the start of Python."""
    with tempfile.TemporaryDirectory() as out:
        words = [f"family={family}", f"n={rows}", "backend=static", "executor=serial", f"out={out}"]
        start, used = time.perf_counter(), _cpu_seconds()
        subprocess.run([sys.executable, "-m", "vramcast", "build", *words], check=True, capture_output=True)
        seconds, cpu_seconds = time.perf_counter() - start, _cpu_seconds() - used
        written = (Path(out) / "journal.jsonl").read_bytes().count(b'"type":"row"')
    if written != rows:
        raise RuntimeError(f"expected {rows} rows of {family}, found {written}")
    return rows / seconds, rows / cpu_seconds


def _cpu_seconds() -> float:
    """Return the CPU seconds of all children: more reliable than the clock on a busy machine."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Print one line per family."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print("vramcast build backend=static executor=serial, one core, including the start of the process")
    for family, rows in ROWS.items():
        wall, cpu = rates(family, rows)
        print(f"  family={family} n={rows}: {wall:,.0f} rows per second, {cpu:,.0f} per CPU second", flush=True)


if __name__ == "__main__":
    main()
