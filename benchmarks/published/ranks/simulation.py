"""One rank of a published run: torch.distributed steps its network on the meta device, and the trace is replayed."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.published.ranks.networks import NETWORKS
from vramcast.jobs.job import TABLE_BATCH, dataless_table
from vramcast.simulation.library_versions import library_versions
from vramcast.simulation.result import Peaks, Simulation
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.distributed.rank_session import trace_rank
from vramcast.virtual_gpu.measurement import Status
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.replay.simulate import measurement_of, replay_on, without_limit
from vramcast.virtual_gpu.training.loop import MakeInputs
from vramcast.virtual_gpu.training.setup import TrainingSetup

RANK = 0
"""Sources publish the memory of the first rank, or of one that is not named; all are alike but for uneven shards."""


@dataclass(frozen=True)
class RankResult:
    """The figures that a rank would report, and its simulation as estimators read it."""

    figures: dict[str, int]
    simulation: Simulation


def simulate_rank(parameters: Mapping[str, Any], profile: DeviceProfile) -> RankResult:
    """Simulate a rank; figures are those on the device, or without a memory limit where it does not fit."""
    training = TrainingSetup(**parameters["training"])
    if training.parallelism is None:
        raise RuntimeError("the training has no ranks")
    make_inputs = _batches(parameters["length"], parameters["later_length"])
    table = dataless_table(_subject(parameters), _batches(parameters["length"], None)(TABLE_BATCH))
    subject = _subject(parameters)
    versions = library_versions(subject)
    trace = trace_rank(subject, make_inputs, training, training.parallelism, RANK, profile.compute_capability)
    options = AllocatorOptions(expandable_segments=parameters.get("expandable_segments", False))
    need, bounded = (replay_on(trace, device, options) for device in (without_limit(profile), profile))
    peaks = Peaks(measurement_of(trace, profile, *bounded), measurement_of(trace, profile, *need))
    _, replayed = bounded if peaks.bounded.status is Status.OK else need
    figures = {
        "allocated_bytes": replayed.peak_allocated_bytes,
        "reserved_bytes": replayed.peak_reserved_bytes,
        "active_bytes": replayed.peak_active_bytes,
    }
    return RankResult(figures, Simulation(table, training, {profile.name: peaks}, traced_with=versions))


def _subject(parameters: Mapping[str, Any]) -> nn.Module:
    with torch.device("meta"):
        return NETWORKS[parameters["network"]](**parameters["arguments"]).train()


def _batches(length: int, later_length: int | None) -> MakeInputs:
    """Return a function that makes batches of tokens and labels; those after the first may have another length."""
    lengths = chain([length], repeat(later_length or length))

    def batch(size: int) -> tuple[Tensor, ...]:
        shape = (size, next(lengths))
        tokens, labels = (torch.randint(100, shape, device="meta") for _ in range(2))
        return tokens, labels

    return batch
