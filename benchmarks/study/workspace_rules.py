"""Measure how much each workspace rule of a device profile explains of measured rows.

`python -m benchmarks.study.workspace_rules --data FILE --rows 200` traces a sample of a public table once and replays
it with all rules, with none, and with each rule left out. A rule explains the error that returns without it.
"""

import argparse
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

from tqdm import tqdm

from vramcast.dataset_builder.devices import load_device
from vramcast.dataset_builder.measure.virtual import trace_spec
from vramcast.dataset_builder.schema import Row
from vramcast.dataset_builder.store.importers import read_rows
from vramcast.virtual_gpu.allocator import AllocatorOptions
from vramcast.virtual_gpu.measurement import Status
from vramcast.virtual_gpu.profile import DeviceProfile, parse_profile
from vramcast.virtual_gpu.simulate import simulate


def variants(profile: DeviceProfile) -> Iterator[tuple[str, DeviceProfile]]:
    rules = profile.convolution
    none = tuple(replace(rule, copies=0.0, output_copies=None, weight_copies=None, extra_mib=0) for rule in rules)
    yield "all rules", profile
    yield "no rule", replace(profile, convolution=none)
    for index, rule in enumerate(rules):
        if rule.copies:
            without = (*rules[:index], none[index], *rules[index + 1 :])
            yield f"without: {rule.label}", replace(profile, convolution=without)


def errors_of(row: Row) -> dict[str, float] | None:
    """Return the signed relative error of a completed row by variant."""
    profile = parse_profile(load_device(str(row.provenance.device)))
    trace = trace_spec(row.spec, profile.compute_capability)
    actual = row.measurement.peak_bytes or 1
    measurements = {name: simulate(trace, item, AllocatorOptions()) for name, item in variants(profile)}
    return {name: ((item.device_used_bytes or 0) - actual) / actual for name, item in measurements.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    rows = [row for row in read_rows(arguments.data) if row.measurement.status is Status.OK]
    rows = random.Random(arguments.seed).sample(rows, min(arguments.rows, len(rows)))
    with ProcessPoolExecutor(arguments.workers) as pool:
        results = list(tqdm(pool.map(errors_of, rows, chunksize=4), total=len(rows), unit="row", mininterval=5))
    print(
        f"{len(rows)} rows of {arguments.data.name}, seed {arguments.seed}: error by rule (simulated against measured)"
    )
    for name in results[0]:
        errors = [item[name] for item in results]
        absolute = [abs(error) for error in errors]
        print(f"{name:56} median {median(absolute):6.2%}  mean {fmean(absolute):6.2%}  bias {fmean(errors):+7.2%}")


if __name__ == "__main__":
    main()
