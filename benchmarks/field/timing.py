"""Measures the CPU seconds of one estimate, in a warm process."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from tqdm import tqdm

from benchmarks.field.estimators import FAKE, TABLE, TRACE, TRACKED, Entry
from benchmarks.field.rows import EvaluatedRow
from benchmarks.field.tracked import tracked_mib
from vramcast.dataset_builder.backends.virtual import trace_spec
from vramcast.device.profiles import load_profile
from vramcast.jobs.analysis.layers import layer_table
from vramcast.jobs.families import FAMILIES
from vramcast.jobs.job import TABLE_BATCH, table_of
from vramcast.jobs.spec import Spec
from vramcast.jobs.subject import subject_of
from vramcast.models.buckets import Buckets
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.replay.simulate import simulate
from vramcast.virtual_gpu.training.step import random_inputs

A_FAMILY = 3
"""Rows of each family that are timed."""
_OLD_LIBRARY = "hf"
"""Networks of transformers, whose release of xMem's rows trackers and layer tables cannot run."""


def seconds_of(entries: Sequence[Entry], tested: Sequence[EvaluatedRow], seed: int = 0) -> dict[str, float]:
    """Return seconds by title: the median over the same number of rows from each family."""
    rows = _sample(tested, seed)
    inputs = {row.spec.id: _input_seconds(row) for row in tqdm(rows, desc="timing", unit="row")}
    return {
        entry.title: median(
            sum(inputs[row.spec.id][name] for name in entry.takes) + _predict_seconds(entry, row) for row in rows
        )
        for entry in entries
        if entry.group != "published"
    }


def _sample(tested: Sequence[EvaluatedRow], seed: int) -> list[EvaluatedRow]:
    draw, sample = random.Random(seed), []
    chosen = [item for item in tested if item.spec.family != _OLD_LIBRARY]
    for family in dict.fromkeys(item.family for item in chosen):
        rows = {item.spec.id: item for item in chosen if item.family == family}
        sample += draw.sample(list(rows.values()), min(A_FAMILY, len(rows)))
    return sample


def _input_seconds(row: EvaluatedRow) -> Mapping[str, float]:
    profile = load_profile(row.example.source)
    return {
        TABLE: _seconds(lambda: _table(row.spec)),
        TRACE: _seconds(
            lambda: simulate(trace_spec(row.spec, profile.compute_capability), profile, AllocatorOptions())
        ),
        FAKE: _tracker_seconds(row.spec, track=False),
        TRACKED: _tracker_seconds(row.spec, track=True),
    }


def _table(spec: Spec) -> object:
    """Compute a layer table as `table_of` does, without its cache."""
    if spec.family in FAMILIES:
        return table_of(spec)
    subject, inputs = subject_of(spec)
    return layer_table(
        subject, random_inputs([(item.shape, item.vocabulary) for item in inputs], TABLE_BATCH, "fp32", "meta")
    )


def _tracker_seconds(spec: Spec, track: bool) -> float:
    """Time FakeTensorMode or MemTracker on a spec; if it fails, return the time until the error."""
    start = time.process_time()
    try:
        return tracked_mib(spec, track)[1]
    except Exception:  # torch's modes raise errors of any type
        return time.process_time() - start


def _predict_seconds(entry: Entry, row: EvaluatedRow) -> float:
    """Time the faster of two calls: the first one fills caches."""
    if entry.supported is not None:
        return 0.0
    buckets = Buckets(1000 * MIB, row.example.capacity_bytes)
    return min(_seconds(lambda: entry.estimator.predict([row.example], buckets)) for _ in range(2))


def _seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start
