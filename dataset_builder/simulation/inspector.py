"""Runs a job on the virtual GPU: traced as seldom as devices allow, replayed on each of them."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

from vramcast.dataset_builder.analysis.optimizers import OPTIMIZERS
from vramcast.dataset_builder.families import FAMILIES
from vramcast.dataset_builder.jobs.job import Job, Prepared, SpecJob, own_name
from vramcast.dataset_builder.jobs.optimizers import stand_in
from vramcast.dataset_builder.schema import LayerTable
from vramcast.dataset_builder.simulation.findings import Curve, Findings, LayerCost
from vramcast.errors import UserError
from vramcast.virtual_gpu.allocator import AllocatorOptions
from vramcast.virtual_gpu.measurement import Measurement
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.replay import FREE, Replay
from vramcast.virtual_gpu.session import trace_training
from vramcast.virtual_gpu.simulate import Lowered, measurement_of, replay_on
from vramcast.virtual_gpu.timeline import timeline_of
from vramcast.virtual_gpu.trace import Trace, Use
from vramcast.virtual_gpu.training_setup import TrainingSetup, parse_call

_ENDLESS_MIB = 2**30
"""A card of a pebibyte."""
_CURVE_POINTS = 600
_MOST_COSTS = 50


def _noting(name: str) -> Any:
    def compare(self: "_Capability", other: float) -> Any:
        self.asked = True
        return getattr(float, name)(self, other)

    return compare


class _Capability(float):
    """A compute capability that knows whether anybody asked for it: a trace in which no one did is all devices'."""

    asked = False
    __lt__, __le__, __gt__, __ge__, __eq__ = map(_noting, ("__lt__", "__le__", "__gt__", "__ge__", "__eq__"))
    __hash__ = float.__hash__


@dataclass(frozen=True)
class _Replayed:
    """A trace on one kind of device that has no end."""

    trace: Trace
    lowered: Lowered
    found: Replay


class Inspection(Protocol):
    """A network that is examined under one training setup after the other, in this process or in a child."""

    def examine(self, wishes: Mapping[str, Any], profiles: Sequence[DeviceProfile]) -> Findings:
        """What it takes under the training that is wished for, on some devices."""

    def curve(self, wishes: Mapping[str, Any], profile: DeviceProfile) -> Curve:
        """The memory over time on a device."""


class LocalInspection:
    """An inspection in this process, for networks that no user's code is run for."""

    def __init__(self, job: Job) -> None:
        self.inspector = Inspector(job)

    def examine(self, wishes: Mapping[str, Any], profiles: Sequence[DeviceProfile]) -> Findings:
        """What it takes under the training that is wished for, on some devices."""
        with self._blaming_spec():
            return self.inspector.examine(self.inspector.job.setup(wishes), profiles)

    def curve(self, wishes: Mapping[str, Any], profile: DeviceProfile) -> Curve:
        """The memory over time on a device."""
        return self.inspector.curve(self.inspector.job.setup(wishes), profile)

    @contextmanager
    def _blaming_spec(self) -> Iterator[None]:
        """What a library says to the settings of its network is a fault of the spec."""
        try:
            yield
        except Exception as error:
            job = self.inspector.job
            if isinstance(error, UserError) or not isinstance(job, SpecJob) or job.family in FAMILIES:
                raise
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise UserError(f"expected a spec that {job.family} can build and train, found {said}; mend it") from error


class Inspector:
    """Answers what a job takes, under one training setup after the other."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._table: LayerTable | None = None
        self._setup: TrainingSetup | None = None
        self._resolved: TrainingSetup | None = None
        self._traces: dict[float | None, Trace] = {}
        self._replays: dict[Any, _Replayed] = {}

    def examine(self, training: TrainingSetup, profiles: Sequence[DeviceProfile]) -> Findings:
        """Layers, and memory on each of the devices; costs of the layers on the first."""
        self._turn_to(training)
        if self._table is None:
            self._table = self.job.table()
        endless = {profile.name: self._endless(profile) for profile in profiles}
        return Findings(
            table=self._table,
            training=self._resolved or training,
            measurements={item.name: self._measure(item, endless[item.name]) for item in profiles},
            endless={item.name: self._measurement(item, endless[item.name]) for item in profiles},
            costs=_costs(endless[profiles[0].name], self._table)[:_MOST_COSTS],
            family=self.job.family,
        )

    def curve(self, training: TrainingSetup, profile: DeviceProfile) -> Curve:
        """The memory over time on a device; without end where the job does not fit."""
        self._turn_to(training)
        replayed = self._endless(profile)
        found = timeline_of(replayed.trace, _without_end(profile))
        keep = _kept_points([sum(values) for values in zip(*found.requested_bytes.values(), strict=True)])
        return Curve(
            {use: [values[point] for point in keep] for use, values in found.requested_bytes.items()},
            [found.reserved_bytes[point] for point in keep],
            found.context_bytes,
            profile.available_bytes,
        )

    def _turn_to(self, training: TrainingSetup) -> None:
        if training != self._setup:
            self._setup, self._traces, self._replays = training, {}, {}

    def _trace(self, capability: float) -> Trace:
        found = self._traces.get(None) or self._traces.get(capability)
        if found is None:
            if self._setup is None:
                raise RuntimeError("there is no setup to trace")
            noting = _Capability(capability)
            job = self.job.prepared(self._setup)
            found = trace_training(
                job.subject,
                job.make_inputs,
                job.training,
                compute_capability=noting,
                make_optimizer=job.make_optimizer,
                owners=True,
            )
            places = self.job.places
            found.approximations = {
                f"{phrase} (at {places[phrase]})" if phrase in places else phrase for phrase in found.approximations
            }
            self._resolved = _as_known(job, found)
            self._traces[capability if noting.asked else None] = found
        return found

    def _endless(self, profile: DeviceProfile) -> _Replayed:
        """The replay on a card without end; devices that differ in size and context alone share it."""
        trace = self._trace(profile.compute_capability)
        key = (id(trace), tuple(profile.workspace_bytes(call) for call in trace.calls))
        if key not in self._replays:
            self._replays[key] = _Replayed(trace, *replay_on(trace, _without_end(profile), AllocatorOptions()))
        return self._replays[key]

    def _measure(self, profile: DeviceProfile, endless: _Replayed) -> Measurement:
        """What fits without end on the way there is no other on the card itself."""
        room_bytes = profile.capacity_bytes(endless.trace.has_convolutions, endless.trace.has_batch_norm)
        if endless.found.peak_reserved_bytes <= room_bytes:
            return self._measurement(profile, endless)
        return measurement_of(endless.trace, profile, *replay_on(endless.trace, profile, AllocatorOptions()))

    def _measurement(self, profile: DeviceProfile, endless: _Replayed) -> Measurement:
        return measurement_of(endless.trace, profile, endless.lowered, endless.found)


def _as_known(job: Prepared, trace: Trace) -> TrainingSetup:
    """The setup, with the nearest optimizer of torch.optim in the place of one that estimators do not know."""
    if parse_call(job.training.optimizer)[0] in OPTIMIZERS:
        return job.training
    dead = {block for block, size in trace.events if size == FREE}
    state_bytes = sum(
        size for block, size in trace.events
        if size != FREE and trace.uses[block] == Use.OPTIMIZER_STATE and trace.owners[block] and block not in dead
    )  # fmt: skip
    trainable = sum(item.numel() * item.element_size() for item in job.subject.parameters() if item.requires_grad)
    return replace(job.training, optimizer=stand_in(state_bytes, trainable))


def _without_end(profile: DeviceProfile) -> DeviceProfile:
    return replace(profile, total_mib=_ENDLESS_MIB)


def _costs(replayed: _Replayed, table: LayerTable) -> tuple[LayerCost, ...]:
    """What is alive at the peak, by the layer that it was made for."""
    kinds = {layer.name: layer.kind for layer in reversed(table.layers) if not layer.functional}
    live = set(replayed.found.live_at_peak)
    held: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for block, size in replayed.lowered.events:
        if size != FREE and block in live:
            use = Use(replayed.trace.uses[block])
            owner = "" if use in (Use.WORKSPACE, Use.INPUTS) else own_name(replayed.trace.owners[block])
            if owner:
                held[owner][use.name.lower()] += size
    costs = [LayerCost(name, kinds.get(name, "block"), dict(uses)) for name, uses in held.items()]
    return tuple(sorted(costs, key=lambda item: -item.total_bytes))


def _kept_points(requested: Sequence[int]) -> list[int]:
    """Return at most some hundred points, the highest of each of as many equal stretches, so that no peak is lost."""
    count = len(requested)
    if count <= _CURVE_POINTS:
        return list(range(count))
    size, longer = divmod(count, _CURVE_POINTS)
    starts = [index * size + min(index, longer) for index in range(_CURVE_POINTS + 1)]
    return [max(range(start, end), key=requested.__getitem__) for start, end in pairwise(starts)]
