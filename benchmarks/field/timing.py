"""Seconds of CPU that an estimate of one job takes, in a process that has imported everything."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from tqdm import tqdm

from benchmarks.field.estimators import FAKE, TABLE, TRACE, TRACKED, Entry
from benchmarks.field.rows import Asked
from benchmarks.field.tracked import tracked_mib
from vramcast.dataset_builder.analysis.layers import layer_table
from vramcast.dataset_builder.devices import load_profile
from vramcast.dataset_builder.families import FAMILIES
from vramcast.dataset_builder.jobs.job import TABLE_BATCH, table_of
from vramcast.dataset_builder.measure.virtual import trace_spec
from vramcast.dataset_builder.schema import Spec
from vramcast.dataset_builder.subject import subject_of
from vramcast.models.labels import Buckets
from vramcast.virtual_gpu.allocator import AllocatorOptions
from vramcast.virtual_gpu.simulate import simulate
from vramcast.virtual_gpu.sizes import MIB
from vramcast.virtual_gpu.training_step import random_inputs

A_FAMILY = 3
"""Jobs of each family that are timed."""


def seconds_of(entries: Sequence[Entry], asked: Sequence[Asked], seed: int = 0) -> dict[str, float]:
    """By title: the median over some jobs, those of each family counting the same."""
    jobs = _sample(asked, seed)
    inputs = {job.spec.id: _inputs(job) for job in tqdm(jobs, desc="timing", unit="job")}
    return {
        entry.title: median(
            sum(inputs[job.spec.id][name] for name in entry.takes) + _answer_seconds(entry, job) for job in jobs
        )
        for entry in entries
        if entry.group != "published"
    }


def _sample(asked: Sequence[Asked], seed: int) -> list[Asked]:
    draw, found = random.Random(seed), []
    for family in dict.fromkeys(item.family for item in asked):
        known = {item.spec.id: item for item in asked if item.family == family}
        found += draw.sample(list(known.values()), min(A_FAMILY, len(known)))
    return found


def _inputs(job: Asked) -> Mapping[str, float]:
    profile = load_profile(job.example.source)
    return {
        TABLE: _seconds(lambda: _table(job.spec)),
        TRACE: _seconds(
            lambda: simulate(trace_spec(job.spec, profile.compute_capability), profile, AllocatorOptions())
        ),
        FAKE: _foreign(job.spec, track=False),
        TRACKED: _foreign(job.spec, track=True),
    }


def _table(spec: Spec) -> object:
    """As `table_of`, without what it remembers."""
    if spec.family in FAMILIES:
        return table_of(spec)
    subject, inputs = subject_of(spec)
    return layer_table(
        subject, random_inputs([(item.shape, item.vocabulary) for item in inputs], TABLE_BATCH, "fp32", "meta")
    )


def _foreign(spec: Spec, track: bool) -> float:
    """Of a mode that cannot do with a network, the time until it says so."""
    start = time.process_time()
    try:
        return tracked_mib(spec, track)[1]
    except Exception:  # any error of a foreign mode
        return time.process_time() - start


def _answer_seconds(entry: Entry, job: Asked) -> float:
    """Of the second call: the first one fills caches."""
    if entry.known is not None:
        return 0.0
    buckets = Buckets(1000 * MIB, job.example.capacity_bytes)
    return min(_seconds(lambda: entry.estimator.predict([job.example], buckets)) for _ in range(2))


def _seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start
