"""The measurements of growth, each in new processes."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from benchmarks.performance.service_load import ask, jobs, process

LAYERS = (10, 30, 100, 300, 1000, 3000, 10_000)
PARAMETERS = tuple(10**power for power in range(6, 13))
BATCHES = (1, 4, 16, 64, 256, 1024, 4096, 16_384)
CORES = (1, 2)
CONNECTIONS = (1, 2, 4, 8, 16, 32, 64)
BUILT_ROWS = 60
_NETWORKS = 50
"""Different networks in the requests to the service."""
_REQUESTS = 3000


def tasks() -> list[tuple[str, int]]:
    """Return all measurements as (kind, size)."""
    traces = {"layers": LAYERS, "parameters": PARAMETERS, "batch": BATCHES}
    cores = [count for count in CORES if count <= len(os.sched_getaffinity(0))]
    return [
        *((kind, size) for kind, sizes in traces.items() for size in sizes),
        *(("cores", count) for count in cores),
        *(("connections", count) for count in CONNECTIONS),
    ]


def measure_all(results: Path) -> pd.DataFrame:
    """Return one line per figure, with its kind, size, name and value.

    Figures are stored as they are measured, so an interrupted run resumes; a complete run starts over.
    """
    partial = results.with_suffix(".partial.csv")
    results.parent.mkdir(parents=True, exist_ok=True)
    measured = (
        set(pd.read_csv(partial)[["kind", "size"]].itertuples(index=False, name=None)) if partial.exists() else set()
    )
    for kind, size in (bar := tqdm(tasks(), unit="run", desc="growth")):
        bar.set_postfix_str(f"{kind} {size:,}")
        if (kind, size) not in measured:
            _measure_and_store(kind, size, partial)
    partial.replace(results)
    return pd.read_csv(results)


def _measure_and_store(kind: str, size: int, path: Path) -> None:
    """Measure and store one size; a failure is printed and left out, so that the others are still measured."""
    try:
        figures = measure(kind, size)
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        print(f"note: {kind} {size:,} was not measured: {error}", file=sys.stderr)
        return
    lines = [{"kind": kind, "size": size, "figure": name, "value": value} for name, value in figures.items()]
    pd.DataFrame(lines).to_csv(path, mode="a", header=not path.exists(), index=False)


def measure(kind: str, size: int) -> dict[str, float]:
    """Return the figures of one measurement."""
    if kind == "cores":
        return built(size)
    return served(size) if kind == "connections" else traced(kind, size)


def traced(kind: str, size: int) -> dict[str, float]:
    """Trace in a child process; return its CPU seconds and memory."""
    words = [sys.executable, "-W", "ignore", "-m", "benchmarks.performance.growth.child", kind, str(size)]
    figures: dict[str, float] = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    return figures


def built(cores: int) -> dict[str, float]:
    """Time a build pinned to this many cores, with as many workers, including the start of its processes."""
    words = ["family=cnn", f"n={BUILT_ROWS}", "executor=local", f"executor.workers={cores}"]
    with tempfile.TemporaryDirectory() as out, pinned(cores):
        start = time.perf_counter()
        command = [sys.executable, "-m", "vramcast", "build", *words, f"out={out}"]
        subprocess.run(command, check=True, capture_output=True)
        seconds = time.perf_counter() - start
        rows = (Path(out) / "journal.jsonl").read_bytes().count(b'"type":"row"')
    return {"seconds": seconds, "rows_a_second": rows / seconds}


@contextmanager
def pinned(cores: int) -> Iterator[None]:
    """Pin this process and the children that it starts to this many cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:cores])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def served(connections: int) -> dict[str, float]:
    """Measure the service's latency over this many connections, each of which repeats without pause."""
    requests = jobs(_NETWORKS, seed=0)
    with process(["-m", "vramcast", "serve", "--port"], "/readyz") as service:
        ask(service.port, "/v1/classify", requests, len(requests))  # warm up
        replies = ask(service.port, "/v1/classify", requests, _REQUESTS, connections)
    return {
        "p50_ms": replies.percentile_ms(0.5),
        "p99_ms": replies.percentile_ms(0.99),
        "requests_a_second": replies.rate,
    }


def figures_of(table: pd.DataFrame, kind: str, figure: str) -> tuple[list[float], list[float]]:
    """Return sizes and values of one curve."""
    part = table[(table["kind"] == kind) & (table["figure"] == figure)].sort_values("size")
    return part["size"].astype(float).tolist(), part["value"].astype(float).tolist()
