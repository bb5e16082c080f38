"""From a virtual GPU that a script has used to a report: peaks on each device, layers, lines, steps."""

import gc
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import nn

from vramcast.dataset_builder.analysis.optimizers import OPTIMIZERS
from vramcast.dataset_builder.jobs.optimizers import stand_in
from vramcast.dataset_builder.run.report import LineCost, PhasePeak, RunReport, StepPeak
from vramcast.dataset_builder.schema import LayerRecord, LayerTable
from vramcast.dataset_builder.simulation.simulation import Curve, LayerCost, Peaks, Simulation
from vramcast.virtual_gpu.allocator import AllocatorOptions
from vramcast.virtual_gpu.cuda.run_record import PHASES, RunRecord
from vramcast.virtual_gpu.cuda.virtual_cuda import VirtualCuda
from vramcast.virtual_gpu.measurement import Measurement, Status
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.replay import FREE, Replay
from vramcast.virtual_gpu.simulate import Lowered, measurement_of, replay_on
from vramcast.virtual_gpu.timeline import timeline_of
from vramcast.virtual_gpu.trace import Trace, Use
from vramcast.virtual_gpu.training_setup import TrainingSetup

_MOST_LINES = 10
_MOST_COSTS = 50
_CURVE_POINTS = 600
_UNBOUNDED_MIB = 2**30
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def report_of(
    gpu: VirtualCuda,
    others: Sequence[DeviceProfile],
    *,
    ending: str,
    failure: str | None = None,
    traceback: str = "",
    ran_out_of_memory: bool = False,
    seconds: float = 0.0,
) -> RunReport:
    """Return the report of a run; `others` are devices that its trace is replayed on."""
    trace, record = gpu.tracer.trace, gpu.record
    _mark_parameters(gpu)
    lowered, replayed = replay_on(trace, unbounded(gpu.profile), gpu.options)
    simulation = None
    if record.roots and trace.events:
        simulation = _simulation(gpu, others, lowered, replayed, ran_out_of_memory)
    _, expandable = replay_on(trace, unbounded(gpu.profile), AllocatorOptions(expandable_segments=True))
    return RunReport(
        simulation=simulation,
        ending=ending,
        failure=failure,
        traceback=traceback,
        ran_out_of_memory=ran_out_of_memory,
        phases=_phases(record),
        steps=tuple(
            StepPeak(step.peak.allocated_bytes, step.peak.reserved_bytes, step.phase, step.shapes)
            for step in record.steps
        ),
        lines=_lines(gpu, lowered, replayed),
        assumptions=tuple(map(str, gpu.assumptions.all())),
        unwritten=tuple(gpu.unwritten),
        survived_ooms=len(gpu.memory.ooms) - ran_out_of_memory,
        expandable_reserved_bytes=None if gpu.options.expandable_segments else expandable.peak_reserved_bytes,
        operators=gpu.tracer.operators,
        seconds=seconds,
        curve=_curve(gpu),
    )


def _simulation(
    gpu: VirtualCuda,
    others: Sequence[DeviceProfile],
    lowered: Lowered,
    replayed: Replay,
    ran_out_of_memory: bool,
) -> Simulation:
    trace = gpu.tracer.trace
    own = _live_measurement(gpu, lowered, replayed, ran_out_of_memory)
    peaks = {gpu.profile.name: Peaks(own, replace(own, status=Status.OK, evidence=None))}
    for profile in others:
        if profile.name not in peaks:
            bounded = measurement_of(trace, profile, *replay_on(trace, profile, gpu.options))
            need = measurement_of(trace, profile, *replay_on(trace, unbounded(profile), gpu.options))
            peaks[profile.name] = Peaks(bounded, need)
    table = _table(gpu.record)
    return Simulation(
        table=table,
        training=_training(gpu),
        peaks=peaks,
        costs=_costs(trace, lowered, replayed, table),
        family="module",
        traced_with={"torch": torch.__version__},
    )


def _live_measurement(gpu: VirtualCuda, lowered: Lowered, replayed: Replay, ran_out_of_memory: bool) -> Measurement:
    """Return what the live allocator saw: retries and failed allocations are in it, unlike in a replay."""
    peak = gpu.record.peak
    measured = measurement_of(gpu.tracer.trace, gpu.profile, lowered, replayed)
    overhead_bytes = measured.breakdown["context"]
    held = {name: size for name, size in measured.breakdown.items() if name not in ("context", "allocator_cache")}
    cache_bytes = max(peak.reserved_bytes - sum(held.values()), 0)
    return replace(
        measured,
        status=Status.OOM if ran_out_of_memory else Status.OK,
        allocated_bytes=peak.allocated_bytes,
        reserved_bytes=peak.reserved_bytes,
        device_used_bytes=peak.reserved_bytes + overhead_bytes,
        breakdown={**held, "allocator_cache": cache_bytes, "context": overhead_bytes},
        evidence=gpu.memory.ooms[-1] if ran_out_of_memory else None,
    )


def _mark_parameters(gpu: VirtualCuda) -> None:
    """Mark the parameters of all networks that are alive: copies, such as averages, were born as anything."""
    for item in gc.get_objects():
        if issubclass(type(item), nn.Module):  # isinstance would ask objects that are loaded lazily
            for tensor in (*item._parameters.values(), *item._buffers.values()):
                if isinstance(tensor, torch.Tensor):
                    gpu.tracer.mark(tensor, Use.PARAMETERS)


def _phases(record: RunRecord) -> tuple[PhasePeak, ...]:
    return tuple(
        PhasePeak(phase, record.by_phase[phase].allocated_bytes, record.by_phase[phase].reserved_bytes)
        for phase in PHASES
        if phase in record.by_phase
    )


def _lines(gpu: VirtualCuda, lowered: Lowered, replayed: Replay) -> tuple[LineCost, ...]:
    """Return the lines of the user's code whose blocks are alive at the peak, the costliest first."""
    live, places = set(replayed.live_at_peak), gpu.tracer.places
    held: Counter[str] = Counter()
    for block, size in lowered.events:
        if size != FREE and block in live and (place := places[block]):
            held[place] += size
    return tuple(LineCost(place, size) for place, size in held.most_common(_MOST_LINES))


def _curve(gpu: VirtualCuda) -> Curve | None:
    """Return the memory over the events of the run."""
    if not gpu.tracer.trace.events:
        return None
    course = timeline_of(gpu.tracer.trace, unbounded(gpu.profile), gpu.options)
    totals = [sum(values) for values in zip(*course.requested_bytes.values(), strict=True)]
    points = highest_points(totals)
    return Curve(
        {use: [values[point] for point in points] for use, values in course.requested_bytes.items()},
        [course.reserved_bytes[point] for point in points],
        course.context_bytes,
        gpu.profile.available_bytes,
    )


def unbounded(profile: DeviceProfile) -> DeviceProfile:
    """Return the profile of a device that never runs out of memory."""
    return replace(profile, total_mib=_UNBOUNDED_MIB)


def highest_points(totals: Sequence[int]) -> list[int]:
    """Return the highest point of each of some hundred equal stretches, so that no peak is lost."""
    count = len(totals)
    if count <= _CURVE_POINTS:
        return list(range(count))
    bounds = [index * count // _CURVE_POINTS for index in range(_CURVE_POINTS + 1)]
    return [max(range(start, end), key=totals.__getitem__) for start, end in pairwise(bounds)]


def _costs(trace: Trace, lowered: Lowered, replayed: Replay, table: LayerTable) -> tuple[LayerCost, ...]:
    """Return what each layer holds at the peak, the costliest first."""
    kinds = {layer.name: layer.kind for layer in reversed(table.layers)}
    live = set(replayed.live_at_peak)
    held: dict[str, Counter[str]] = defaultdict(Counter)
    for block, size in lowered.events:
        if size != FREE and block in live and trace.owners[block]:
            use = Use(trace.uses[block])
            if use not in (Use.WORKSPACE, Use.INPUTS):
                held[trace.owners[block]][use.name.lower()] += size
    costs = [LayerCost(name, kinds.get(name, "block"), dict(uses)) for name, uses in held.items()]
    return tuple(sorted(costs, key=lambda item: -item.total_bytes)[:_MOST_COSTS])


def _table(record: RunRecord) -> LayerTable:
    """Return the layers that ran in the first training pass of each network."""
    shapes = record.steps[0].shapes if record.steps else record.current.shapes
    batch = _batch_size(record)
    layers = [
        LayerRecord(call.name, call.kind, call.shape[1:], call.elements // batch, call.parameters)
        for call in record.layers
    ]
    trainable = tuple(
        tuple(item.shape) for root in record.roots.values() for item in root.parameters() if item.requires_grad
    )
    elements = sum(torch.Size(shape).numel() for shape in shapes) // batch
    return LayerTable(tuple(layers), trainable, max(elements, 1))


def _batch_size(record: RunRecord) -> int:
    shapes = record.steps[0].shapes if record.steps else record.current.shapes
    first = next((shape for shape in shapes if shape), (1,))
    return max(first[0], 1)


def _training(gpu: VirtualCuda) -> TrainingSetup:
    """Return the training as far as a run shows it."""
    record = gpu.record
    parameters = [item for root in record.roots.values() for item in root.parameters()]
    counts = Counter(_DTYPES.get(item.dtype, "fp32") for item in parameters)
    trainable = [item for item in parameters if item.requires_grad]
    optimizers = list(record.optimizers.values())
    name = type(optimizers[0]).__name__ if optimizers else "SGD"
    if name not in OPTIMIZERS:
        state_bytes = sum(
            value.numel() * value.element_size()
            for optimizer in optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )
        name = stand_in(state_bytes, sum(item.numel() * item.element_size() for item in trainable))
    return TrainingSetup(
        batch_size=_batch_size(record),
        loss="own",
        optimizer=name,
        dtype=counts.most_common(1)[0][0] if counts else "fp32",
        autocast={torch.bfloat16: "bf16", torch.float16: "fp16"}.get(record.autocast) if record.autocast else None,
        accumulate=max(record.steps[0].backward_passes if record.steps else 1, 1),
        cudnn_benchmark=bool(torch.backends.cudnn.benchmark),
    )
