"""`vramcast device calibrate`: find the rules and constants of a device profile from probes or rows."""

import argparse
import datetime
import os
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

from vramcast.dataset_builder.configuration import make_cuda
from vramcast.dataset_builder.devices import DEFAULT_DEVICE, device_names, is_shipped, load_profile, user_conf
from vramcast.dataset_builder.families import make_spec
from vramcast.dataset_builder.measure import Backend
from vramcast.dataset_builder.measure.cuda.gpu_probes import GpuProbes
from vramcast.dataset_builder.measure.virtual import VirtualBackend, trace_spec
from vramcast.dataset_builder.progress import bar
from vramcast.dataset_builder.schema import Row, Spec
from vramcast.dataset_builder.store import read_journal
from vramcast.dataset_builder.store.durable import replacing
from vramcast.dataset_builder.store.importers import read_rows
from vramcast.dataset_builder.store.splits import in_half
from vramcast.errors import UserError, check_count
from vramcast.virtual_gpu.allocator import AllocatorOptions
from vramcast.virtual_gpu.calibration.agreement import agreement
from vramcast.virtual_gpu.calibration.probes import Measure, Probe
from vramcast.virtual_gpu.calibration.probing import RuleSearch
from vramcast.virtual_gpu.calibration.rows import Calibration, Sample, calibrate
from vramcast.virtual_gpu.measurement import Status
from vramcast.virtual_gpu.profile import ConvolutionWorkspace, DeviceProfile
from vramcast.virtual_gpu.records import without_defaults
from vramcast.virtual_gpu.simulate import simulate
from vramcast.virtual_gpu.trace import Trace
from vramcast.virtual_gpu.training_setup import TrainingSetup

_AGREEMENT_CALLS = 20_000


def run(arguments: argparse.Namespace) -> None:
    """Fit a profile, write it, and print its errors."""
    check_count("--rows", arguments.rows)
    check_count("--test", arguments.test, least=0)
    if arguments.from_rows and arguments.from_device:
        raise UserError("expected --from-rows or --from-device, found both: drop one")
    name = arguments.name
    path = _profile_path(name, arguments.output, arguments.force)
    start = load_profile(arguments.start or (name if name in device_names() else DEFAULT_DEVICE))
    if arguments.from_rows:
        result, source = _from_rows(arguments, start), Path(arguments.from_rows).name
    elif arguments.from_device:
        result, source = _from_device(load_profile(arguments.from_device), arguments.seed), arguments.from_device
    else:
        result, source = _from_gpu(name, start, arguments.seed), "its own"
    write_profile(path, result, name, source)
    print(f"{path}: fitted to {result.rows} rows, median error {result.median_error_before:.2%} -> ", end="")
    print(f"{result.median_error_after:.2%}; {'; '.join(result.changed) or 'nothing changed'}")


def _from_rows(arguments: argparse.Namespace, start: DeviceProfile) -> Calibration:
    rows = load_rows(Path(arguments.from_rows))
    rows = [row for row in rows if in_half(row.spec, arguments.half)]
    chosen, rest = choose(rows, arguments.rows, arguments.seed)
    initial = from_scratch(start) if arguments.from_scratch else start
    result = calibrate(initial, samples_of(chosen, start.compute_capability), arguments.seed)
    if arguments.test and rest:
        samples = samples_of(rest[: arguments.test], start.compute_capability)
        for label, profile in (("before", initial), ("fitted", result.profile), (f"profile {start.name}", start)):
            print(f"on {len(samples)} other rows, {label}: {error_on(profile, samples)}")
    return result


def _from_gpu(name: str, start: DeviceProfile, seed: int) -> Calibration:
    """Measure probes and a few rows on this machine's GPU; an interrupted run resumes."""
    probes = GpuProbes(Path("rows/calibrate") / f"{name}.jsonl")
    backend = make_cuda({}).lanes()[0]
    search = RuleSearch(bar_of_rounds(probes), seed)
    search.run()
    return _with_constants(replace(from_scratch(start), **probes.libraries), search, backend)


def _from_device(truth: DeviceProfile, seed: int) -> Calibration:
    """Calibrate to the virtual GPU with a profile that the search does not see, and print what it recovers."""
    search = RuleSearch(bar_of_rounds(lambda probes: {item: truth.workspace_bytes(item.call) for item in probes}), seed)
    search.run()
    result = _with_constants(from_scratch(truth), search, VirtualBackend(truth))
    known = search.learned.keys() | search.checked.keys()
    for line in agreement(truth, result.profile, known, _AGREEMENT_CALLS, seed).lines():
        print(line)
    return result


def bar_of_rounds(measure: Measure) -> Measure:
    """Return a measurement of probes that reports each round."""

    def measured(probes: Sequence[Probe]) -> Mapping[Probe, int]:
        if probes:
            print(f"note: measuring {len(probes)} probes", file=sys.stderr)
        return measure(probes)

    return measured


def _with_constants(bare: DeviceProfile, search: RuleSearch, backend: Backend) -> Calibration:
    """Fit the constants to a few small rows, whose reserved memory is known."""
    profile = replace(bare, convolution=search.rules, align_channels=search.align)
    samples = []
    for spec in constant_specs():
        measurement = backend.measure(spec).measurement
        if measurement.status is Status.OK and measurement.device_used_bytes:
            trace = trace_spec(spec, bare.compute_capability)
            samples.append(Sample(trace, measurement.device_used_bytes, measurement.reserved_bytes))
    result = calibrate(profile, samples, rules=False)
    summary = f"rules from {len(search.learned)} probes; {search.shares[-1]:.1%} of the last random probes take what "
    summary += f"they say; channels are padded to {search.align}"
    return replace(result, evidence=(summary, *search.evidence()))


def constant_specs() -> list[Spec]:
    """Return small specs without convolutions, with them, and with batch norm as well."""
    setups = [TrainingSetup(batch_size=size) for size in (8, 16, 32)]
    mlp = {"arch": "uniform", "input_features": 64, "output_features": 10, "depth": 2}
    cnn = {"arch": "uniform", "input_channels": 3, "input_size": 32, "num_classes": 10, "depth": 2, "base_filters": 16}
    networks: list[tuple[str, dict[str, Any]]] = [("mlp", mlp), ("cnn", cnn), ("cnn", {**cnn, "norm": "batch"})]
    return [make_spec(family, network, setup) for family, network in networks for setup in setups]


def _profile_path(name: str, output: str | None, force: bool) -> Path:
    """Return the file to write, which must not exist unless `force` is set."""
    if not name.isidentifier():
        raise UserError(f"expected letters, digits and underscores in a device's name, found {name!r}: change it")
    if is_shipped(name) and not output:
        raise UserError(f"expected a new name, found the shipped profile {name}: choose another, or write it with -o")
    path = Path(output or user_conf() / "device" / f"{name}.yaml")
    if path.exists() and not force:
        raise UserError(f"expected no profile at {path}, found one: choose another with -o, or replace it with --force")
    return path


def load_rows(path: Path) -> list[Row]:
    """Return the measured rows of a build directory, of a file of `device verify --record`, or of a public table."""
    journal = path.is_dir() or path.suffix == ".jsonl"
    rows = read_journal(path).rows if journal else list(read_rows(path))
    measured = [row for row in rows if row.provenance.origin == "measured"]
    if not measured:
        raise UserError(f"expected rows in {path} that were measured on a GPU, found none: name another")
    return _check_one_gpu(measured, path)


def _check_one_gpu(rows: list[Row], path: Path) -> list[Row]:
    gpus = sorted({str(row.provenance.device) for row in rows})
    if len(gpus) > 1:
        raise UserError(f"expected rows of one GPU in {path}, found {gpus}: measure on one, or choose rows of one")
    return rows


def choose(rows: Iterable[Row], count: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Draw `count` completed rows at random; return them and the rest. Rows of one network stay together."""
    completed = [row for row in rows if row.measurement.status is Status.OK and row.measurement.device_used_bytes]
    groups = sorted({row.spec.group for row in completed})
    random.Random(seed).shuffle(groups)  # noqa: S311 - a sample, no secret
    order = {group: place for place, group in enumerate(groups)}
    completed.sort(key=lambda row: (order[row.spec.group], row.spec.id))
    last = completed[min(count, len(completed)) - 1].spec.group if completed else None
    chosen = [row for row in completed if last is not None and order[row.spec.group] <= order[last]]
    return chosen, completed[len(chosen) :]


def samples_of(rows: Sequence[Row], capability: float) -> list[Sample]:
    """Trace rows on all cores."""
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


def error_on(profile: DeviceProfile, samples: Sequence[Sample]) -> str:
    """Return the relative error of a profile on samples, in words."""
    errors = []
    for sample in samples:
        measurement = simulate(sample.trace, profile, AllocatorOptions())
        errors.append(abs((measurement.device_used_bytes or 0) - sample.used_bytes) / sample.used_bytes)
    return f"median error {median(errors):.2%}, mean {fmean(errors):.2%}"


def from_scratch(profile: DeviceProfile) -> DeviceProfile:
    """Return a profile without fitted constants, and with one copy for all convolutions."""
    bare = replace(profile, context_mib=0, cudnn_mib=0, batch_norm_mib=0, other_mib=0, align_channels=4)
    return replace(bare, convolution=(ConvolutionWorkspace(copies=1.0),), calibrated_on=None)


def write_profile(path: Path, result: Calibration, name: str, source: str) -> None:
    """Write a calibrated profile with its evidence."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    evidence = (
        f"{result.rows} rows of {source}, {today}: median error {result.median_error_before:.2%} before, "
        f"{result.median_error_after:.2%} after, on the same rows"
    )
    profile = replace(result.profile, name=name, calibrated_on=evidence)
    settings: dict[str, Any] = {**without_defaults(profile), "calibrated_on": evidence}
    settings["convolution"] = [without_defaults(rule) for rule in profile.convolution]
    header = [f"{profile.title}, calibrated by `vramcast device calibrate`.", *(result.evidence or result.changed)]
    text = yaml.safe_dump(settings, sort_keys=False, default_flow_style=None, width=120)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text("".join(f"# {line}\n" for line in header) + text)
