"""Memory over the course of a traced training run, by what it holds."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataset_builder.measure.virtual.allocator import AllocatorOptions
from dataset_builder.measure.virtual.backend import replay_on
from dataset_builder.measure.virtual.profile import DeviceProfile
from dataset_builder.measure.virtual.replay import EMPTY_CACHE, FREE
from dataset_builder.measure.virtual.trace import Trace, Use


@dataclass(frozen=True)
class Timeline:
    """One point for each event, up to the one that did not fit."""

    requested_bytes: Mapping[str, NDArray[np.int64]]
    """By use."""
    reserved_bytes: NDArray[np.int64]
    context_bytes: int
    """What the device holds beside: it stays the same."""


def timeline_of(trace: Trace, profile: DeviceProfile, options: AllocatorOptions | None = None) -> Timeline:
    """Replay a trace on a device, point by point."""
    lowered, found = replay_on(trace, profile, options or AllocatorOptions(), timeline=True)
    reserved = np.asarray(found.reserved_timeline, dtype=np.int64)
    changes = np.zeros((len(Use), len(reserved)), dtype=np.int64)
    sizes: dict[int, int] = {}
    for point, (block, size) in enumerate(lowered.events[: len(reserved)]):
        if (block, size) == EMPTY_CACHE:
            continue
        taken = 0 if block in found.forgone else size
        change = -sizes.pop(block) if size == FREE else sizes.setdefault(block, taken)
        changes[trace.uses[block], point] = change
    totals = changes.cumsum(axis=1)
    return Timeline(
        {use.name.lower(): totals[use] for use in Use},
        reserved,
        profile.overhead_bytes(trace.has_convolutions, trace.has_batch_norm),
    )
