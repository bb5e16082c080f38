"""`vramcast device calibrate`: find rules and constants of a device profile from probes, rows, cuDNN or snapshots."""

import argparse
import datetime
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

from vramcast.commands.device.probe_calibration import from_device, from_gpu, from_scratch
from vramcast.dataset_builder.backends.virtual import trace_spec
from vramcast.dataset_builder.rows import Row
from vramcast.dataset_builder.store import read_journal
from vramcast.dataset_builder.store.importers import read_rows
from vramcast.dataset_builder.store.splits import in_half
from vramcast.device.calibration.agreement import agreement
from vramcast.device.calibration.recordings import calibrated, evidence_of
from vramcast.device.calibration.rows import Calibration, Sample, calibrate
from vramcast.device.profiles import DEFAULT_DEVICE, device_names, is_shipped, load_profile, user_conf
from vramcast.errors import UserError, check_count
from vramcast.files.durable import replacing
from vramcast.jobs.spec import Spec
from vramcast.progress import bar
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.canonical import without_defaults
from vramcast.virtual_gpu.cudnn.library import installed_cudnn
from vramcast.virtual_gpu.measurement import Status
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.recordings.files import read_recording
from vramcast.virtual_gpu.replay.simulate import simulate
from vramcast.virtual_gpu.tracing.trace import Trace

_COMPARED_CALLS = 2000


def run(arguments: argparse.Namespace) -> None:
    """Fit a profile, write it, and print its errors."""
    check_count("--rows", arguments.rows)
    check_count("--test", arguments.test, least=0)
    ways = (arguments.from_rows, arguments.from_device, arguments.from_cudnn, arguments.from_snapshot)
    if sum(map(bool, ways)) > 1:
        raise UserError(
            "expected one of --from-rows, --from-device, --from-cudnn and --from-snapshot, found more: drop the others"
        )
    name = arguments.name
    path = _profile_path(name, arguments.output, arguments.force)
    if (arguments.from_cudnn or arguments.from_snapshot) and not arguments.start and name not in device_names():
        way = "--from-cudnn" if arguments.from_cudnn else "--from-snapshot"
        raise UserError(
            f"expected --start DEVICE with {way}, found a new name, {name}: name the GPU, as `vramcast device "
            "list` does"
        )
    start = load_profile(arguments.start or (name if name in device_names() else DEFAULT_DEVICE))
    if arguments.from_cudnn:
        _write_with_cudnn(path, replace(start, name=name), arguments.seed)
        return
    if arguments.from_snapshot:
        _write_from_snapshots(path, replace(start, name=name), arguments.from_snapshot)
        return
    if arguments.from_rows:
        result, source = _from_rows(arguments, start), Path(arguments.from_rows).name
    elif arguments.from_device:
        result, source = from_device(load_profile(arguments.from_device), arguments.seed), "the virtual GPU"
    else:
        result, source = from_gpu(name, start, arguments.seed), "its own"
    write_profile(path, result, name, source)
    print(f"{path}: fitted to {result.rows} rows, median error {result.median_error_before:.2%} -> ", end="")
    print(f"{result.median_error_after:.2%}; {'; '.join(result.changed) or 'nothing changed'}")


def _write_with_cudnn(path: Path, start: DeviceProfile, seed: int) -> None:
    """Write a profile that asks the installed cuDNN for workspaces, and print how often its rules gave the same."""
    release = installed_cudnn().release
    profile = replace(start.without_rules, cudnn_release=release, calibrated_on=None)
    # Asked before the profile is written: a release may know no GPU of this kind.
    compared = None if start.cudnn_release else agreement(profile, start, (), _COMPARED_CALLS, seed)
    header = f"{profile.title}, with workspaces from cuDNN {release}, by `vramcast device calibrate --from-cudnn`."
    _write(path, [header], without_defaults(profile))
    print(f"{path}: {profile.title}, with workspaces from cuDNN {release}")
    if compared:
        print(f"rules gave the same workspace for {compared.equal} of {compared.calls} random convolutions")


def _write_from_snapshots(path: Path, start: DeviceProfile, files: Sequence[Path]) -> None:
    """Write a profile with the constants that memory snapshots of this kind of GPU show."""
    recordings = [(file.name, read_recording(file)) for file in files]
    evidence = evidence_of(recordings, start.total_mib * MIB)
    profile, lines = calibrated(start, evidence)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    header = f"{profile.title}, with constants from {len(files)} memory snapshots, {today}:"
    settings: dict[str, Any] = {**without_defaults(profile)}
    settings["convolution"] = [without_defaults(rule) for rule in profile.convolution]
    _write(path, [header, *lines], settings)
    print(f"{path}: {profile.title}, from {len(files)} memory snapshots")
    for line in lines:
        print(f"  {line}")


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
    order = {group: index for index, group in enumerate(groups)}
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


def write_profile(path: Path, result: Calibration, name: str, source: str) -> None:
    """Write a calibrated profile with its evidence."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    evidence = "; ".join(
        (
            *result.evidence[:1],
            f"{result.rows} rows of {source}, {today}: median error {result.median_error_before:.2%} before, "
            f"{result.median_error_after:.2%} after, on the same rows",
        )
    )
    profile = replace(result.profile, name=name, calibrated_on=evidence)
    settings: dict[str, Any] = {**without_defaults(profile), "calibrated_on": evidence}
    settings["convolution"] = [without_defaults(rule) for rule in profile.convolution]
    header = [f"{profile.title}, calibrated by `vramcast device calibrate`.", *(result.evidence[1:] or result.changed)]
    _write(path, header, settings)


def _write(path: Path, header: Iterable[str], settings: Mapping[str, Any]) -> None:
    style = None if settings.get("convolution") else False  # a rule on each line
    text = yaml.safe_dump(dict(settings), sort_keys=False, default_flow_style=style, width=120)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text("".join(f"# {line}\n" for line in header) + text)
