"""Compare measured rows with the trials of cudnn.benchmark that their jobs ran.

`python -m benchmarks.study.trials --data FILE` counts the rows that lie far above their estimate, by the memory that
the trials above the estimate allocate together. Without such trials there should be none.
"""

import argparse
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from vramcast.dataset_builder.backends.virtual import trace_spec
from vramcast.dataset_builder.rows import Row
from vramcast.dataset_builder.store.importers import read_rows
from vramcast.dataset_builder.store.splits import HALVES, in_half
from vramcast.device.profiles import load_profile
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.measurement import Status
from vramcast.virtual_gpu.replay.simulate import measurement_of, replay_on
from vramcast.virtual_gpu.replay.trials import trials_of

_FAR, _NEAR = 1.1, 1.02
_EDGES_GIB = (0, 10, 50, 100, 200)


@dataclass(frozen=True)
class Comparison:
    """A measured row beside its estimate and its trials."""

    used_bytes: int
    estimate_bytes: int
    largest_bytes: int
    tried_bytes: int
    """The workspaces of all trials that exceed the estimate."""

    @property
    def is_far(self) -> bool:
        return self.used_bytes > _FAR * self.estimate_bytes


def compare(row: Row) -> Comparison:
    profile = load_profile(str(row.provenance.device))
    trace = trace_spec(row.spec, profile.compute_capability)
    lowered, replayed = replay_on(trace, profile, AllocatorOptions())
    simulated = measurement_of(trace, profile, lowered, replayed)
    estimate_bytes, overhead_bytes = simulated.device_used_bytes or 0, simulated.breakdown["context"]
    trials = list(trials_of(trace, replayed, profile.available_bytes - overhead_bytes))
    trials = [item for item in trials if overhead_bytes + item.reserved_bytes > _NEAR * estimate_bytes]
    largest_bytes = max((overhead_bytes + item.reserved_bytes for item in trials), default=estimate_bytes)
    tried_bytes = sum(item.workspace_bytes for item in trials)
    return Comparison(row.measurement.peak_bytes or 0, estimate_bytes, largest_bytes, tried_bytes)


def report(items: Sequence[Comparison]) -> str:
    far = [item for item in items if item.is_far]
    held = sum(item.used_bytes <= _NEAR * item.largest_bytes for item in far)
    lines = [f"{len(far)} of {len(items)} rows are far above the estimate, {held} of them within their largest trial"]
    for low, high in zip(_EDGES_GIB, (*_EDGES_GIB[1:], None), strict=True):
        band = [
            item for item in items if low < item.tried_bytes / 2**30 and (not high or item.tried_bytes / 2**30 <= high)
        ]
        lines.append(
            f"trials of {low} to {high or 'more'} GiB: {sum(item.is_far for item in band)} of {len(band)} rows"
        )
    none = [item for item in items if not item.tried_bytes]
    return "\n".join([*lines, f"no trial: {sum(item.is_far for item in none)} of {len(none)} rows"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", type=int, help="a sample; all by default")
    parser.add_argument("--half", choices=list(HALVES))
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    rows = [row for row in read_rows(arguments.data) if row.measurement.status is Status.OK]
    rows = [row for row in rows if in_half(row.spec, arguments.half)]
    rows = random.Random(0).sample(rows, min(arguments.rows or len(rows), len(rows)))
    with ProcessPoolExecutor(arguments.workers) as pool:
        items = list(tqdm(pool.map(compare, rows, chunksize=4), total=len(rows), unit="row", mininterval=5))
    print(report(items))


if __name__ == "__main__":
    main()
