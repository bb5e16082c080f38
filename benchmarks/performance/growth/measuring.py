"""What is measured, each in fresh processes."""

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
"""That the service is asked about over and over."""
_REQUESTS = 3000


def tasks() -> list[tuple[str, int]]:
    """All measurements, as kind and size."""
    traces = {"layers": LAYERS, "parameters": PARAMETERS, "batch": BATCHES}
    cores = [count for count in CORES if count <= len(os.sched_getaffinity(0))]
    return [
        *((kind, size) for kind, sizes in traces.items() for size in sizes),
        *(("cores", count) for count in cores),
        *(("connections", count) for count in CONNECTIONS),
    ]


def measure_all(kept: Path) -> pd.DataFrame:
    """A line for each figure: kind, size, what it is, and its value.

    Each is written down as it is found, so that a run that was stopped goes on; one that ended begins anew.
    """
    partial = kept.with_suffix(".partial.csv")
    kept.parent.mkdir(parents=True, exist_ok=True)
    known = (
        set(pd.read_csv(partial)[["kind", "size"]].itertuples(index=False, name=None)) if partial.exists() else set()
    )
    wanted = tasks()
    for kind, size in (bar := tqdm(wanted, unit="run", desc="growth")):
        bar.set_postfix_str(f"{kind} {size:,}")
        if (kind, size) not in known:
            _keep(kind, size, partial)
    partial.replace(kept)
    return pd.read_csv(kept)


def _keep(kind: str, size: int, path: Path) -> None:
    """Measure and write down; what fails is told and left out, for the others are worth having without it."""
    try:
        figures = measure(kind, size)
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        print(f"note: {kind} {size:,} was not measured: {error}", file=sys.stderr)
        return
    lines = [{"kind": kind, "size": size, "figure": name, "value": value} for name, value in figures.items()]
    pd.DataFrame(lines).to_csv(path, mode="a", header=not path.exists(), index=False)


def measure(kind: str, size: int) -> dict[str, float]:
    """The figures of one run."""
    if kind == "cores":
        return built(size)
    return served(size) if kind == "connections" else traced(kind, size)


def traced(kind: str, size: int) -> dict[str, float]:
    """CPU seconds of a trace, and the peak of its process."""
    words = [sys.executable, "-W", "ignore", "-m", "benchmarks.performance.growth.child", kind, str(size)]
    found: dict[str, float] = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    return found


def built(cores: int) -> dict[str, float]:
    """Rows a second of a build pinned to so many cores, with as many workers; the start of the processes counts."""
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
    """Children that are started inside get no more than so many cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:cores])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def served(connections: int) -> dict[str, float]:
    """Latency of a service that is asked over so many connections at once, each as soon as it is answered."""
    known = jobs(_NETWORKS, seed=0)
    with process(["-m", "vramcast", "serve", "--port"], "/readyz") as service:
        ask(service.port, "/v1/classify", known, len(known))  # it has met them all
        found = ask(service.port, "/v1/classify", known, _REQUESTS, connections)
    return {
        "p50_ms": found.percentile_ms(0.5),
        "p99_ms": found.percentile_ms(0.99),
        "requests_a_second": found.rate,
    }


def figures_of(table: pd.DataFrame, kind: str, figure: str) -> tuple[list[float], list[float]]:
    """Sizes and values of one curve."""
    part = table[(table["kind"] == kind) & (table["figure"] == figure)].sort_values("size")
    return part["size"].astype(float).tolist(), part["value"].astype(float).tolist()
