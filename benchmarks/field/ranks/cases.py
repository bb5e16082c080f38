"""A published row that can be simulated, and its simulation."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn

from vramcast.dataset_builder.devices import load_profile
from vramcast.virtual_gpu.allocator import CachingAllocator
from vramcast.virtual_gpu.distributed.parallelism import Parallelism
from vramcast.virtual_gpu.distributed.rank_session import trace_rank
from vramcast.virtual_gpu.replay import Replay, replay
from vramcast.virtual_gpu.simulate import lower
from vramcast.virtual_gpu.training_setup import TrainingSetup

GIB = 2**30
Record = dict[str, str]


@dataclass(frozen=True)
class Case:
    """A row that can be simulated."""

    name: str
    metric: str
    published_gib: float
    device: str
    make: Callable[[], nn.Module]
    length: int
    setup: TrainingSetup
    parallelism: Parallelism
    key: Any = None
    """Equal for rows that share a simulation."""
    visible_gib: float | None = None
    """The memory of the GPU that the row was measured on, where it decides: the allocator frees its cache before it
    runs out."""
    later_length: int | None = None
    """The length of all batches after the first, if it differs."""


def simulated(case: Case) -> Replay:
    """Simulate a case on a device without a memory limit, or with that of its GPU."""
    with torch.device("meta"):
        network = case.make().train()
    profile = load_profile(case.device)

    lengths = chain([case.length], repeat(case.later_length or case.length))

    def batch(size: int) -> tuple[Tensor, ...]:
        shape = (size, next(lengths))
        tokens, labels = (torch.randint(100, shape, device="meta") for _ in range(2))
        return tokens, labels

    trace = trace_rank(network, batch, case.setup, case.parallelism, 0, profile.compute_capability)
    capacity = None
    if case.visible_gib is not None:
        capacity = int(case.visible_gib * GIB) - profile.overhead_bytes(convolutions=False)
    return replay(
        lower(trace, profile).events,
        CachingAllocator(capacity),
        streams=trace.streams,
        operations=trace.stream_operations,
    )


def figure_gib(result: Replay, metric: str) -> float:
    """Return the figure of a replay that a metric names."""
    peaks = {
        "allocated": result.peak_allocated_bytes,
        "active": result.peak_active_bytes,
        "reserved": result.peak_reserved_bytes,
    }
    return peaks[metric] / GIB
