"""Compare the own plan of compiled code (B) with Inductor's (A): `python -m benchmarks.performance.compile_agreement`.

A needs torch 2.13. Both run without a GPU, on small versions of twelve networks; neither is a measurement.
"""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from unittest import mock

import torch

from benchmarks.performance.compile_networks import CASES, Case
from vramcast.device.profiles import load_profile
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.replay.simulate import replay_on, without_limit
from vramcast.virtual_gpu.tracing.session import trace_training
from vramcast.virtual_gpu.training.setup import TrainingSetup

_BATCH = 32


@dataclass(frozen=True)
class Peaks:
    """The peaks of one training, and the seconds of its trace."""

    active_bytes: int
    reserved_bytes: int
    seconds: float


def peaks(case: Case, compiled: bool = True, by_inductor: bool = False) -> Peaks:
    """Trace and replay one case, eager or compiled."""
    with torch.device("meta"):
        network = case.make().train()
    setup = TrainingSetup(
        batch_size=_BATCH, loss=case.loss, optimizer="AdamW", autocast=case.autocast,
        compile="model" if compiled else "none",
    )  # fmt: skip
    start = perf_counter()
    with ExitStack() as stack:
        if by_inductor:
            from benchmarks.performance import inductor_oracle  # noqa: PLC0415 - needs one release of torch
            from vramcast.virtual_gpu.compiled import session  # noqa: PLC0415

            stack.enter_context(mock.patch.object(session, "compile_graph", inductor_oracle.oracle))
            stack.enter_context(inductor_oracle.inductor_for_cuda())
        trace = trace_training(network, case.inputs, setup)
    seconds = perf_counter() - start
    replay = replay_on(trace, without_limit(load_profile("a100_80gb")), AllocatorOptions())[1]
    return Peaks(replay.peak_active_bytes, replay.peak_reserved_bytes, seconds)


def main(names: Sequence[str]) -> int:
    """Print a table."""
    print(f"{'network':14} {'active MiB':>11} {'A':>9} {'B':>9} {'B to A':>8}   reserved A, B, B to A      seconds")
    for name in names or CASES:
        eager = peaks(CASES[name], compiled=False)
        own, theirs = peaks(CASES[name]), peaks(CASES[name], by_inductor=True)
        active, reserved = ([item.active_bytes, item.reserved_bytes] for item in (theirs, own))
        change = [100 * (mine / its - 1) for mine, its in zip(reserved, active, strict=True)]
        mib = [size / 2**20 for size in (eager.active_bytes, active[0], reserved[0], active[1], reserved[1])]
        print(
            f"{name:14} {mib[0]:11.1f} {mib[1]:9.1f} {mib[2]:9.1f} {change[0]:+7.2f} %   {mib[3]:8.0f} {mib[4]:8.0f} "
            f"{change[1]:+7.2f} %   {eager.seconds:.1f} {theirs.seconds:.1f} {own.seconds:.1f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
