"""Memory over the course of a traced training run, by what it holds."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.replay.replay import FREE
from vramcast.virtual_gpu.replay.simulate import replay_on
from vramcast.virtual_gpu.tracing.trace import Trace, Use


@dataclass(frozen=True)
class Timeline:
    """One point for each event, up to the one that did not fit."""

    requested_bytes: Mapping[str, Sequence[int]]
    """By use."""
    reserved_bytes: Sequence[int]
    context_bytes: int
    """What the device holds beside: it stays the same."""


def timeline_of(trace: Trace, profile: DeviceProfile, options: AllocatorOptions | None = None) -> Timeline:
    """Replay a trace on a device, point by point."""
    lowered, replayed = replay_on(trace, profile, options or AllocatorOptions(), timeline=True)
    reserved = list(replayed.reserved_timeline or ())
    requested = {use: array("q", bytes(8 * len(reserved))) for use in Use}
    totals = dict.fromkeys(Use, 0)
    sizes: dict[int, int] = {}
    for point, (block, size) in enumerate(lowered.events[: len(reserved)]):
        if block >= 0:
            taken = 0 if block in replayed.forgone else size
            change = -sizes.pop(block) if size == FREE else sizes.setdefault(block, taken)
            totals[Use(trace.uses[block])] += change
        for use, total in totals.items():
            requested[use][point] = total
    return Timeline(
        {use.name.lower(): values.tolist() for use, values in requested.items()},
        reserved,
        profile.overhead_bytes(trace.has_convolutions, trace.has_batch_norm, trace.world_size),
    )
