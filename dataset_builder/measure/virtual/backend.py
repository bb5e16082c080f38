"""The virtual GPU as a backend: trace the training step, lower it onto a device, replay it through the allocator."""

import time
from dataclasses import dataclass, replace

from dataset_builder.analysis.static import static_estimate
from dataset_builder.families import plan_of
from dataset_builder.filters import Rejected, check
from dataset_builder.measure._base import Backend, Outcome
from dataset_builder.measure.virtual.allocator import AllocatorOptions, CachingAllocator
from dataset_builder.measure.virtual.profile import DeviceProfile
from dataset_builder.measure.virtual.replay import Replay, replay
from dataset_builder.measure.virtual.session import trace_training
from dataset_builder.measure.virtual.trace import FREE, ConvolutionCall, Trace, Use, call_of
from dataset_builder.schema import Measurement, Spec, Status
from dataset_builder.subject import build_subject, make_inputs

Event = tuple[int, int]
MIB = 2**20


class VirtualBackend(Backend):
    """Simulates: no figure of this backend was read off a card."""

    name = "virtual"
    origin = "simulated"

    def __init__(self, profile: DeviceProfile, options: AllocatorOptions | None = None) -> None:
        self.profile = profile
        self.options = options or AllocatorOptions()
        self.device = profile.name

    def measure(self, spec: Spec) -> Outcome:
        """Trace and replay a spec of one of the families."""
        start = time.perf_counter()
        table = check(spec)
        if isinstance(table, Rejected):
            raise TypeError(f"the filter rejects this spec: {table.reason}")
        trace = trace_spec(spec)
        measurement = simulate(trace, self.profile, self.options)
        seconds = round(time.perf_counter() - start, 4)
        return Outcome(static_estimate(spec.training, table), replace(measurement, seconds=seconds))


def trace_spec(spec: Spec) -> Trace:
    """The trace of a spec's training."""
    plan, setup = plan_of(spec), spec.training
    subject = build_subject(plan, setup.dtype)
    return trace_training(subject, lambda size: make_inputs(plan, size, setup.dtype), setup)


def simulate(trace: Trace, profile: DeviceProfile, options: AllocatorOptions) -> Measurement:
    """What a trace takes on a device."""
    convolutions = any(isinstance(call, ConvolutionCall) for call in trace.calls)
    capacity_bytes = profile.capacity_bytes(convolutions)
    allocator = CachingAllocator(capacity_bytes, options, total_bytes=profile.total_mib * MIB)
    lowered = lower(trace, profile)
    found = replay(lowered.events, allocator, optional=lowered.workspaces)
    overhead_bytes = profile.overhead_bytes(convolutions)
    return Measurement(
        status=Status.OK if found.oom_event is None else Status.OOM,
        requested_bytes=found.peak_requested_bytes,
        allocated_bytes=found.peak_allocated_bytes,
        reserved_bytes=found.peak_reserved_bytes,
        device_used_bytes=found.peak_reserved_bytes + overhead_bytes,
        breakdown={**breakdown(trace, lowered, found), "context": overhead_bytes},
        evidence=found.oom_message,
    )


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
    """Bytes by what they hold when the requested bytes peaked; the rest of the reserved peak is the allocator's cache."""
    live = set(found.live_at_peak)
    totals = dict.fromkeys((use.name.lower() for use in Use), 0)
    for block, size in lowered.events:
        if size != FREE and block in live:
            totals[Use(trace.uses[block]).name.lower()] += size
    return {**totals, "allocator_cache": found.peak_reserved_bytes - sum(totals.values())}
