"""From a trace, its replays and a layer table to a `Simulation`: peaks, costs of layers, memory over time.

Specs, modules, scripts and ranks all take this way.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from vramcast.jobs.job import own_name
from vramcast.jobs.spec import LayerTable
from vramcast.simulation.result import Curve, LayerCost, Peaks, Simulation
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.replay.replay import FREE, Replay
from vramcast.virtual_gpu.replay.simulate import Lowered, measurement_of, replay_on, without_limit
from vramcast.virtual_gpu.replay.timeline import timeline_of
from vramcast.virtual_gpu.tracing.trace import Trace, Use
from vramcast.virtual_gpu.training.setup import TrainingSetup

_CURVE_POINTS = 600
_MOST_COSTS = 50


@dataclass(frozen=True)
class UnboundedReplay:
    """A trace replayed on a device without a memory limit."""

    trace: Trace
    lowered: Lowered
    replay: Replay


class Replays:
    """Replays of traces. Devices that differ only in size and context share those without a memory limit."""

    def __init__(self, allocator: AllocatorOptions) -> None:
        self.allocator = allocator
        self._unbounded: dict[Any, UnboundedReplay] = {}

    def unbounded(self, trace: Trace, profile: DeviceProfile) -> UnboundedReplay:
        """Replay a trace without a memory limit."""
        key = (id(trace), tuple(profile.workspace_bytes(call) for call in trace.calls))
        if key not in self._unbounded:
            self._unbounded[key] = UnboundedReplay(trace, *replay_on(trace, without_limit(profile), self.allocator))
        return self._unbounded[key]

    def peaks(self, trace: Trace, profile: DeviceProfile) -> Peaks:
        """Return the peaks on a device; a job that fits has the same ones with and without a limit."""
        free = self.unbounded(trace, profile)
        need = measurement_of(trace, profile, free.lowered, free.replay)
        room_bytes = profile.capacity_bytes(trace.has_convolutions, trace.has_batch_norm, trace.world_size)
        if free.replay.peak_reserved_bytes <= room_bytes:
            return Peaks(need, need)
        return Peaks(measurement_of(trace, profile, *replay_on(trace, profile, self.allocator)), need)


def simulation_of(
    table: LayerTable,
    training: TrainingSetup,
    replayed: Sequence[tuple[DeviceProfile, UnboundedReplay]],
    replays: Replays,
    *,
    live: Mapping[str, Peaks] | None = None,
    **facts: Any,
) -> Simulation:
    """Return the simulation of a job.

    Args:
        table: The layers.
        training: The setup as it was traced.
        replayed: Devices and the unbounded replay of the job's (largest) trace on each; the first decides on the costs.
        replays: Where the trace is replayed within the limits of a device.
        live: Peaks by device that an allocator saw while the job ran, which no replay replaces.
        facts: Other fields of the simulation.
    """
    peaks = {**(live or {})}
    for profile, unbounded in replayed:
        if profile.name not in peaks:
            peaks[profile.name] = replays.peaks(unbounded.trace, profile)
    return Simulation(table=table, training=training, peaks=peaks, costs=costs_of(replayed[0][1], table), **facts)


def costs_of(unbounded: UnboundedReplay, table: LayerTable) -> tuple[LayerCost, ...]:
    """Sum the blocks that are alive at the peak by the layer that they were made for, the costliest first."""
    kinds = {layer.name: layer.kind for layer in reversed(table.layers) if not layer.functional}
    live = set(unbounded.replay.live_at_peak)
    held: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for block, size in unbounded.lowered.events:
        if block in live and size != FREE:
            use = Use(unbounded.trace.uses[block])
            owner = "" if use in (Use.WORKSPACE, Use.INPUTS) else own_name(unbounded.trace.owners[block])
            if owner:
                held[owner][use.name.lower()] += size
    costs = [LayerCost(name, kinds.get(name, "block"), dict(uses)) for name, uses in held.items()]
    return tuple(sorted(costs, key=lambda item: -item.total_bytes)[:_MOST_COSTS])


def curve_of(trace: Trace, profile: DeviceProfile, allocator: AllocatorOptions) -> Curve:
    """Return the memory over a trace on a device without a memory limit."""
    timeline = timeline_of(trace, without_limit(profile), allocator)
    points = _highest_points([sum(values) for values in zip(*timeline.requested_bytes.values(), strict=True)])
    return Curve(
        {use: [values[point] for point in points] for use, values in timeline.requested_bytes.items()},
        [timeline.reserved_bytes[point] for point in points],
        timeline.context_bytes,
        profile.available_bytes,
    )


def _highest_points(totals: Sequence[int]) -> list[int]:
    """Return the highest point of each of some hundred equal stretches, so that no peak is lost."""
    count = len(totals)
    if count <= _CURVE_POINTS:
        return list(range(count))
    bounds = [index * count // _CURVE_POINTS for index in range(_CURVE_POINTS + 1)]
    return [max(range(start, end), key=totals.__getitem__) for start, end in pairwise(bounds)]
