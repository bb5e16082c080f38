"""Show how the reserved memory of a script grows with the number of its batches, no two of which are alike.

Run `python -m benchmarks.collocation.varying_shapes [--recipe NAME --batch-size N] [--seeds N] [--steps N]`; without a
recipe, Mask R-CNN with the batch size of its script. All figures are simulated, without the context; a hundred steps
take one to six minutes.
"""

import argparse
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from benchmarks.collocation.tables import DEVICE
from benchmarks.page import show
from vramcast.device.profiles import load_profile
from vramcast.errors import check_count
from vramcast.jobs.families.script_jobs import script_subject
from vramcast.jobs.recipes import spec_of_recipe
from vramcast.jobs.script_spec import ScriptSpecJob
from vramcast.simulation.emulated_job import EmulatedJob
from vramcast.virtual_gpu.allocator.sizes import MIB

SHOWN = (10, 20, 30, 50, 100, 200)


def peaks_mib(recipe: str, batch_size: int, seed: int, steps: int) -> tuple[list[int], int]:
    """Return the highest reserved memory up to each step, and the highest allocated memory."""
    spec = spec_of_recipe(recipe, batch_size, {"steps": steps, "seed": seed})
    script = script_subject(spec)
    if script is None:
        raise RuntimeError(f"the recipe {recipe} is not that of a live script")
    job = EmulatedJob(ScriptSpecJob(spec, script), spec.training, load_profile(DEVICE))
    reserved = accumulate((step.peak.reserved_bytes // MIB for step in job.steps), max)
    return list(reserved), max(step.peak.allocated_bytes // MIB for step in job.steps)


def line(seed: int, reserved: Sequence[int], allocated: int) -> str:
    """Return a line of the table."""
    cells = [f"{reserved[step - 1]:,}" for step in SHOWN if step <= len(reserved)]
    return f"| {seed} | {' | '.join(cells)} | {allocated:,} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="mask_rcnn")
    parser.add_argument("--batch-size", type=int, default=8, help="if the recipe has none")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--page", type=Path, help="write the table into its marked part of this page")
    arguments = parser.parse_args()
    check_count("--seeds", arguments.seeds)
    check_count("--steps", arguments.steps)
    shown = [str(step) for step in SHOWN if step <= arguments.steps]
    lines = [f"| seed | reserved, MiB, after {' | '.join(shown)} steps | allocated, MiB |"]
    lines.append(f"| ---: |{' ---: |' * (len(shown) + 1)}")
    for seed in range(arguments.seeds):
        lines.append(line(seed, *peaks_mib(arguments.recipe, arguments.batch_size, seed, arguments.steps)))
    show(arguments.page, "collocation.varying_shapes", arguments.recipe, "\n".join(lines))


if __name__ == "__main__":
    main()
