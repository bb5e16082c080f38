"""`vramcast build calibrate`: a device profile from rows that were measured on the card, or are measured for it now."""

import datetime
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from vramcast.dataset_builder.configuration import compose_build, make_build, make_executor, out_of, settings_of
from vramcast.dataset_builder.measure.virtual import trace_spec
from vramcast.dataset_builder.pipeline import run_with_bar
from vramcast.dataset_builder.progress import bar
from vramcast.dataset_builder.schema import Row, Spec
from vramcast.dataset_builder.store import read_journal
from vramcast.dataset_builder.store.durable import replacing
from vramcast.dataset_builder.store.importers import read_rows
from vramcast.errors import UserError
from vramcast.virtual_gpu.allocator import AllocatorOptions
from vramcast.virtual_gpu.calibration import Calibration, Sample
from vramcast.virtual_gpu.measurement import Status
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.records import without_defaults
from vramcast.virtual_gpu.simulate import simulate
from vramcast.virtual_gpu.trace import Trace

PLAN: Mapping[str, int] = {"mlp": 6, "cnn": 16, "template": 8}
"""Rows that are measured of each family: the first of an orthogonal array over its space."""


def measure_rows(out: Path, overrides: Sequence[str]) -> list[Row]:
    """Measure the rows of the plan on this machine's card; a run that was stopped goes on where it was."""
    rows: list[Row] = []
    for family, count in PLAN.items():
        words = [f"family={family}", f"n={count}", "sampler=orthogonal", "backend=cuda", f"out={out / family}"]
        config = compose_build([*words, *overrides])
        build = make_build(settings_of(config, words), out_of(config))
        run_with_bar(build, make_executor(config, build.backend), family)
        rows += read_journal(build.out).rows
    return _of_one_card(rows, out)


def load_rows(path: Path) -> list[Row]:
    """The measured rows of one card: of a build directory, of what verify-gpu recorded, or of a public table."""
    journal = path.is_dir() or path.suffix == ".jsonl"
    rows = read_journal(path).rows if journal else list(read_rows(path))
    measured = [row for row in rows if row.provenance.origin == "measured"]
    if not measured:
        raise UserError(f"expected rows in {path} that were measured on a card, found none: name another")
    return _of_one_card(measured, path)


def _of_one_card(rows: list[Row], path: Path) -> list[Row]:
    cards = sorted({str(row.provenance.device) for row in rows})
    if len(cards) > 1:
        raise UserError(f"expected rows of one card in {path}, found {cards}: measure or choose those of one alone")
    return rows


def choose(rows: Iterable[Row], count: int, seed: int) -> tuple[list[Row], list[Row]]:
    """So many completed rows at random, and the rest; rows of one network stay together."""
    completed = [row for row in rows if row.measurement.status is Status.OK and row.measurement.device_used_bytes]
    groups = sorted({row.spec.group for row in completed})
    random.Random(seed).shuffle(groups)  # noqa: S311 - a sample, no secret
    order = {group: place for place, group in enumerate(groups)}
    completed.sort(key=lambda row: (order[row.spec.group], row.spec.id))
    last = completed[min(count, len(completed)) - 1].spec.group if completed else None
    chosen = [row for row in completed if last is not None and order[row.spec.group] <= order[last]]
    return chosen, completed[len(chosen) :]


def samples_of(rows: Sequence[Row], capability: float) -> list[Sample]:
    """The traces of rows, made on all cores."""
    jobs = [(row.spec, capability) for row in rows]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool:
        traces = bar(pool.map(_trace, jobs), total=len(jobs), unit="row", desc="tracing")
        try:
            pairs = list(zip(rows, traces, strict=True))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [Sample(trace, row.measurement.device_used_bytes or 0) for row, trace in pairs]


def _trace(job: tuple[Spec, float]) -> Trace:
    return trace_spec(*job)


def error_on(profile: DeviceProfile, samples: Sequence[Sample]) -> float:
    """The median relative error of a profile on rows that it was not fitted to."""
    errors = []
    for sample in samples:
        found = simulate(sample.trace, profile, AllocatorOptions())
        errors.append(abs((found.device_used_bytes or 0) - sample.used_bytes) / sample.used_bytes)
    return median(errors)


def from_scratch(profile: DeviceProfile) -> DeviceProfile:
    """A profile that knows a card's sizes and nothing of its software: no constants, one copy for every rule."""
    rules = tuple(
        replace(rule, copies=1.0, output_copies=None, weight_copies=None, extra_mib=0) for rule in profile.convolution
    )
    bare = replace(profile, context_mib=0, cudnn_mib=0, batch_norm_mib=0, other_mib=0)
    return replace(bare, convolution=rules, calibrated_on=None)


def write_profile(path: Path, found: Calibration, name: str, source: str) -> None:
    """The profile as a file of `conf/device`, with the evidence that it rests on."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    evidence = (
        f"{found.rows} rows of {source}, {today}: median error {found.median_error_before:.2%} before, "
        f"{found.median_error_after:.2%} after, on the same rows"
    )
    profile = replace(found.profile, name=name, calibrated_on=evidence)
    settings: dict[str, Any] = {**without_defaults(profile), "calibrated_on": evidence}
    settings["convolution"] = [without_defaults(rule) for rule in profile.convolution]
    head = [f"# {profile.title}, calibrated by `vramcast build calibrate`.", *(f"# {line}" for line in found.changed)]
    text = yaml.safe_dump(settings, sort_keys=False, default_flow_style=None, width=120)
    with replacing(path) as temporary:
        temporary.write_text("\n".join(head) + "\n" + text)
