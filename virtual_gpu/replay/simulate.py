"""Simulation of a trace on a device: lower it onto the device's libraries and replay it through the allocator."""

from dataclasses import dataclass, replace

from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions, CachingAllocator
from vramcast.virtual_gpu.measurement import Measurement, Status
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.replay.replay import FREE, Event, Replay, replay
from vramcast.virtual_gpu.replay.trials import trials_of
from vramcast.virtual_gpu.tracing.trace import ConvolutionCall, Trace, Use, call_of

_UNBOUNDED_MIB = 2**30


def without_limit(profile: DeviceProfile) -> DeviceProfile:
    """Return the device with more memory than any job needs."""
    return replace(profile, total_mib=_UNBOUNDED_MIB)


def simulate(trace: Trace, profile: DeviceProfile, options: AllocatorOptions) -> Measurement:
    """Return the memory that a trace takes on a device."""
    return measurement_of(trace, profile, *replay_on(trace, profile, options))


def measurement_of(trace: Trace, profile: DeviceProfile, lowered: "Lowered", replayed: Replay) -> Measurement:
    """Return the measurement that a replay on a device amounts to."""
    parts = trace.has_convolutions, trace.has_batch_norm, trace.world_size
    overhead_bytes = profile.overhead_bytes(*parts)
    peak_bytes = replayed.peak_reserved_bytes
    trials = list(trials_of(trace, replayed, profile.capacity_bytes(*parts), profile.largest_workspace_bytes))
    return Measurement(
        status=Status.OK if replayed.oom_event is None else Status.OOM,
        requested_bytes=replayed.peak_requested_bytes,
        allocated_bytes=replayed.peak_allocated_bytes,
        reserved_bytes=replayed.peak_reserved_bytes,
        device_used_bytes=replayed.peak_reserved_bytes + overhead_bytes,
        trial_bytes=max(peak_bytes, *(item.reserved_bytes for item in trials)) if trials else None,
        tried_bytes=sum(item.workspace_bytes for item in trials if item.reserved_bytes > peak_bytes) or None,
        breakdown={**breakdown(trace, lowered, replayed), "context": overhead_bytes},
        evidence=replayed.oom_message,
        notes=(
            *sorted(trace.approximations),
            *profile.notes,
            *profile.rank_notes(trace.world_size),
            *_forgone_notes(replayed),
        ),
    )


def _forgone_notes(replayed: Replay) -> tuple[str, ...]:
    if not replayed.forgone:
        return ()
    count = len(replayed.forgone)
    convolutions = "1 convolution without its workspace" if count == 1 else f"{count} convolutions without workspaces"
    return (f"memory is short: cuDNN runs {convolutions}, more slowly",)


def replay_on(
    trace: Trace, profile: DeviceProfile, options: AllocatorOptions, timeline: bool = False
) -> tuple["Lowered", Replay]:
    """Lower a trace onto a device and replay it through an allocator with the memory that the device leaves it."""
    capacity_bytes = profile.capacity_bytes(trace.has_convolutions, trace.has_batch_norm, trace.world_size)
    allocator = CachingAllocator(capacity_bytes, options, total_bytes=profile.available_bytes)
    lowered = lower(trace, profile)
    replayed = replay(
        lowered.events,
        allocator,
        optional=lowered.workspaces,
        timeline=timeline,
        streams=trace.streams,
        operations=trace.stream_operations,
    )
    return lowered, replayed


@dataclass(frozen=True)
class Lowered:
    """A trace with the sizes that depend on a device."""

    events: list[Event]
    workspaces: frozenset[int]
    """Blocks for the duration of a convolution: cuDNN takes less if an allocation fails."""


def lower(trace: Trace, profile: DeviceProfile) -> Lowered:
    """Give each library call its workspace on a device."""
    sizes = [profile.workspace_bytes(call) for call in trace.calls]
    events, absent, workspaces = [], set(), []
    for event in trace.events:
        block, size = event
        if size >= 0 or (size == FREE and block not in absent):  # nearly all
            events.append(event)
        elif (index := call_of(size)) is not None:
            if not sizes[index]:
                absent.add(block)
                continue
            events.append((block, sizes[index]))
            if isinstance(trace.calls[index], ConvolutionCall):
                workspaces.append(block)
    return Lowered(events, frozenset(workspaces))


def breakdown(trace: Trace, lowered: Lowered, replayed: Replay) -> dict[str, int]:
    """Return the bytes by use when the requested bytes peaked; the rest of the reserved peak is cache.

    Freed blocks that another stream still uses count as cache.
    """
    live = set(replayed.live_at_peak)
    totals = dict.fromkeys((use.name.lower() for use in Use), 0)
    for block, size in lowered.events:
        if size != FREE and block in live:
            totals[Use(trace.uses[block]).name.lower()] += size
    return {**totals, "allocator_cache": replayed.peak_reserved_bytes - sum(totals.values())}
