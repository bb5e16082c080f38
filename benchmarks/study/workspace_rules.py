"""Measure how much each workspace rule of a device profile explains of measured rows.

`python -m benchmarks.study.workspace_rules --data FILE --rows 200` traces a sample of a public table once and replays
it with all rules, with none, and with each rule left out. A rule explains the error that returns without it.
With `--cudnn`, it compares the rules with what the installed cuDNN chooses (see docs/devices.md), by network or shape.
"""

import argparse
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, median

from tqdm import tqdm

from vramcast.dataset_builder.backends.virtual import trace_spec
from vramcast.dataset_builder.rows import Row
from vramcast.dataset_builder.store.importers import read_rows
from vramcast.device.profiles import load_device
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.cudnn.library import installed_cudnn
from vramcast.virtual_gpu.measurement import Status
from vramcast.virtual_gpu.profile import DeviceProfile, parse_profile
from vramcast.virtual_gpu.replay.simulate import simulate

_EXACT = 0.005


def variants(profile: DeviceProfile) -> Iterator[tuple[str, DeviceProfile]]:
    rules = profile.convolution
    none = tuple(replace(rule, copies=0.0, output_copies=None, weight_copies=None, extra_mib=0) for rule in rules)
    yield "all rules", profile
    yield "no rule", replace(profile, convolution=none)
    for index, rule in enumerate(rules):
        if rule.copies:
            without = (*rules[:index], none[index], *rules[index + 1 :])
            yield f"without: {rule.label}", replace(profile, convolution=without)


def rules_and_cudnn(profile: DeviceProfile) -> Iterator[tuple[str, DeviceProfile]]:
    release = installed_cudnn().release
    yield "all rules", profile
    yield f"cuDNN {release}", replace(profile, convolution=(), cudnn_release=release)


def errors_of(row: Row, cudnn: bool) -> dict[str, float]:
    """Return the signed relative error of a completed row by variant; within the band of a label there is none."""
    profile = parse_profile(load_device(str(row.provenance.device)))
    trace = trace_spec(row.spec, profile.compute_capability)
    most = row.measurement.peak_bytes or 1
    least = row.measurement.least_used_bytes or most
    errors = {}
    for name, item in rules_and_cudnn(profile) if cudnn else variants(profile):
        estimate = simulate(trace, item, AllocatorOptions()).device_used_bytes or 0
        nearest = min(max(estimate, least), most)
        errors[name] = (estimate - nearest) / nearest
    return errors


def line(name: str, errors: list[float]) -> str:
    absolute = [abs(error) for error in errors]
    exact = fmean(error < _EXACT for error in absolute)
    return (
        f"{name:56} median {median(absolute):6.2%}  mean {fmean(absolute):6.2%}  bias {fmean(errors):+7.2%}  "
        f"within {_EXACT:.1%} {exact:4.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cudnn", action="store_true", help="compare the rules with the installed cuDNN alone")
    arguments = parser.parse_args()
    rows = [row for row in read_rows(arguments.data) if row.measurement.status is Status.OK and row.spec.family != "hf"]
    rows = random.Random(arguments.seed).sample(rows, min(arguments.rows, len(rows)))
    with ProcessPoolExecutor(arguments.workers) as pool:
        pending = pool.map(partial(errors_of, cudnn=arguments.cudnn), rows, chunksize=4)
        results = list(tqdm(pending, total=len(rows), unit="row", mininterval=5))
    print(
        f"{len(rows)} rows of {arguments.data.name}, seed {arguments.seed}: error by rule (simulated against measured)"
    )
    groups = {"all": results}
    if arguments.cudnn:
        for row, errors in zip(rows, results, strict=True):
            network = row.spec.network.get("arch") or row.spec.network.get("name")
            groups.setdefault(f"{row.provenance.device} {network}", []).append(errors)
    for group, part in groups.items():
        for name in results[0]:
            print(line(name if len(groups) == 1 else f"{group}: {name}", [item[name] for item in part]))


if __name__ == "__main__":
    main()
