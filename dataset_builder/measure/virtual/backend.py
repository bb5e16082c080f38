"""The virtual GPU as a backend: trace the training step, lower it onto a device, replay it through the allocator."""

import time
from dataclasses import dataclass, replace

from dataset_builder.measure._base import Backend, Outcome
from dataset_builder.measure.static import static_of
from dataset_builder.measure.virtual.allocator import AllocatorOptions, CachingAllocator
from dataset_builder.measure.virtual.profile import DeviceProfile
from dataset_builder.measure.virtual.replay import FREE, Event, Replay, replay
from dataset_builder.measure.virtual.session import trace_training
from dataset_builder.measure.virtual.trace import ConvolutionCall, Trace, Use, call_of
from dataset_builder.schema import MIB, Measurement, Spec, Status
from dataset_builder.subject import subject_of
from dataset_builder.training import random_inputs


class VirtualBackend(Backend):
    """Simulates: no figure of this backend was read off a card."""

    name = "virtual"
    origin = "simulated"

    def __init__(self, profile: DeviceProfile, options: AllocatorOptions | None = None) -> None:
        self.profile = profile
        self.options = options or AllocatorOptions()
        self.device = profile.name

    def measure(self, spec: Spec) -> Outcome:
        """Trace and replay a spec."""
        start = time.perf_counter()
        static = static_of(spec)
        measurement = simulate(trace_spec(spec, self.profile.compute_capability), self.profile, self.options)
        seconds = round(time.perf_counter() - start, 4)
        return Outcome(static, replace(measurement, seconds=seconds))


def trace_spec(spec: Spec, compute_capability: float = 8.0) -> Trace:
    """The trace of a spec's training on cards of that capability."""
    subject, inputs = subject_of(spec)
    shapes = [(item.shape, item.vocabulary) for item in inputs]
    return trace_training(
        subject,
        lambda size: random_inputs(shapes, size, spec.training.dtype, "meta"),
        spec.training,
        compute_capability=compute_capability,
    )


def simulate(trace: Trace, profile: DeviceProfile, options: AllocatorOptions) -> Measurement:
    """What a trace takes on a device."""
    return measurement_of(trace, profile, *replay_on(trace, profile, options))


def measurement_of(trace: Trace, profile: DeviceProfile, lowered: "Lowered", found: Replay) -> Measurement:
    """What a replay on a device came to."""
    overhead_bytes = profile.overhead_bytes(trace.has_convolutions, trace.has_batch_norm)
    return Measurement(
        status=Status.OK if found.oom_event is None else Status.OOM,
        requested_bytes=found.peak_requested_bytes,
        allocated_bytes=found.peak_allocated_bytes,
        reserved_bytes=found.peak_reserved_bytes,
        device_used_bytes=found.peak_reserved_bytes + overhead_bytes,
        breakdown={**breakdown(trace, lowered, found), "context": overhead_bytes},
        evidence=found.oom_message,
        notes=(*sorted(trace.approximations), *profile.notes),
    )


def replay_on(
    trace: Trace, profile: DeviceProfile, options: AllocatorOptions, timeline: bool = False
) -> tuple["Lowered", Replay]:
    """A trace lowered onto a device, and replayed through an allocator that has what the device leaves it."""
    capacity_bytes = profile.capacity_bytes(trace.has_convolutions, trace.has_batch_norm)
    allocator = CachingAllocator(capacity_bytes, options, total_bytes=profile.total_mib * MIB)
    lowered = lower(trace, profile)
    return lowered, replay(lowered.events, allocator, optional=lowered.workspaces, timeline=timeline)


@dataclass(frozen=True)
class Lowered:
    """A trace with the sizes that only a device knows."""

    events: list[Event]
    workspaces: frozenset[int]
    """Blocks for the time of a convolution: cuDNN can do with less where there is no room."""


def lower(trace: Trace, profile: DeviceProfile) -> Lowered:
    """Give each library call its workspace on this device."""
    sizes = [profile.workspace_bytes(call) for call in trace.calls]
    events, absent, workspaces = [], set(), []
    for block, size in trace.events:
        index = call_of(size)
        if index is None:
            if size != FREE or block not in absent:
                events.append((block, size))
        elif sizes[index]:
            events.append((block, sizes[index]))
            if isinstance(trace.calls[index], ConvolutionCall):
                workspaces.append(block)
        else:
            absent.add(block)
    return Lowered(events, frozenset(workspaces))


def breakdown(trace: Trace, lowered: Lowered, found: Replay) -> dict[str, int]:
    """Bytes by what they hold when the requested bytes peaked; the rest of the reserved peak is cache."""
    live = set(found.live_at_peak)
    totals = dict.fromkeys((use.name.lower() for use in Use), 0)
    for block, size in lowered.events:
        if size != FREE and block in live:
            totals[Use(trace.uses[block]).name.lower()] += size
    return {**totals, "allocator_cache": found.peak_reserved_bytes - sum(totals.values())}
