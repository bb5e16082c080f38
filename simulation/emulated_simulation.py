"""A simulation from a virtual GPU that code has run on: peaks on each device, layers, and the training as it was."""

import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from vramcast.jobs.analysis.optimizers import OPTIMIZERS
from vramcast.jobs.job import own_name
from vramcast.jobs.optimizers import stand_in
from vramcast.jobs.spec import LayerRecord, LayerTable
from vramcast.simulation.replays import Replays, UnboundedReplay, simulation_of
from vramcast.simulation.result import Peaks, Simulation
from vramcast.virtual_gpu.cuda.emulation import CudaEmulation
from vramcast.virtual_gpu.cuda.run_record import RunRecord
from vramcast.virtual_gpu.measurement import Measurement, Status
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.replay.simulate import measurement_of
from vramcast.virtual_gpu.tracing.trace import Use
from vramcast.virtual_gpu.training.setup import TrainingSetup

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def simulation_of_run(
    gpu: CudaEmulation,
    others: Sequence[DeviceProfile],
    replays: Replays,
    ran_out_of_memory: bool = False,
    batch_size: int | None = None,
) -> Simulation:
    """Return the simulation of a run: the live peaks on its own device, and those of replays on others.

    Without a batch size, it is that of the first tensor that a network was called with.
    """
    trace = gpu.tracer.trace
    for note in gpu.compile_notes():
        gpu.assumptions.note_once(note)
    _mark_parameters(gpu)
    unbounded = replays.unbounded(trace, gpu.profile)
    own = _emulated_measurement(gpu, unbounded, ran_out_of_memory)
    foreign = tuple(item.name for item in others if not gpu.capability.decides_alike(item.compute_capability))
    simulation = simulation_of(
        _table(gpu.record, batch_size or _batch_size(gpu.record)),
        _training(gpu),
        [(gpu.profile, unbounded), *((item, replays.unbounded(trace, item)) for item in others)],
        replays,
        live={gpu.profile.name: Peaks(own, replace(own, status=Status.OK, evidence=None))},
        family="module",
        notes=_notes(gpu, foreign),
        traced_with={"torch": torch.__version__},
    )
    return replace(
        simulation, peaks={name: _noted(name, item, gpu, foreign) for name, item in simulation.peaks.items()}
    )


def _noted(name: str, peaks: Peaks, gpu: CudaEmulation, foreign: Sequence[str]) -> Peaks:
    """Add the note to the peaks on a device that would run other kernels than the one that the code ran on."""
    if name not in foreign or name == gpu.profile.name:
        return peaks
    notes = (*peaks.bounded.notes, _foreign_kernels((name,), gpu.profile.name))
    return replace(peaks, bounded=replace(peaks.bounded, notes=notes))


def _notes(gpu: CudaEmulation, foreign: Sequence[str]) -> tuple[str, ...]:
    notes = [_foreign_kernels(foreign, gpu.profile.name)] if foreign else []
    if not gpu.record.roots:
        notes.append("no network was trained: the margins are those of training")
    if gpu.history.dropped_events:
        notes.append("the run was long: the figures for other devices replay its stretches with a new peak alone")
    return tuple(notes)


def _foreign_kernels(devices: Sequence[str], traced: str) -> str:
    return (
        f"the figures for {', '.join(devices)} replay the kernels that {traced} runs; another compute capability takes "
        "other kernels: name the device with --device"
    )


def _emulated_measurement(gpu: CudaEmulation, unbounded: UnboundedReplay, ran_out_of_memory: bool) -> Measurement:
    """Return what the live allocator saw: retries and failed allocations are in it, unlike in a replay."""
    peak = gpu.record.peak
    measured = measurement_of(gpu.tracer.trace, gpu.profile, unbounded.lowered, unbounded.replay)
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


def _mark_parameters(gpu: CudaEmulation) -> None:
    """Mark the parameters of all networks that are alive: copies, such as averages, were born as anything."""
    for item in gc.get_objects():
        if issubclass(type(item), nn.Module):  # isinstance would ask objects that are loaded lazily
            for tensor in (*item._parameters.values(), *item._buffers.values()):
                if isinstance(tensor, torch.Tensor):
                    gpu.tracer.mark(tensor, Use.PARAMETERS)


def _table(record: RunRecord, batch: int) -> LayerTable:
    """Return the layers that ran in the first training pass of each network."""
    shapes = _first_shapes(record)
    layers = [
        LayerRecord(own_name(call.name), call.kind, call.shape[1:], call.elements // batch, call.parameters)
        for call in record.layers
    ]
    trainable = tuple(tuple(item.shape) for item in _parameters(record) if item.requires_grad)
    elements = sum(torch.Size(shape).numel() for shape in shapes) // batch
    return LayerTable(tuple(layers), trainable, max(elements, 1))


def _parameters(record: RunRecord) -> list[nn.Parameter]:
    """Return the parameters of all networks that were trained, each once."""
    roots = record.roots or record.evaluated
    unique = {id(item): item for root in roots.values() for item in root.parameters()}
    return list(unique.values())


def _batch_size(record: RunRecord) -> int:
    first = next((shape for shape in _first_shapes(record) if shape), (1,))
    return max(first[0], 1)


def _first_shapes(record: RunRecord) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the first batch, of training where there was any."""
    if not record.roots:
        return record.evaluated_shapes
    return record.steps[0].shapes if record.steps else record.current.shapes


def _training(gpu: CudaEmulation) -> TrainingSetup:
    """Return the training as far as a run shows it."""
    record = gpu.record
    parameters = _parameters(record)
    counts = Counter(_DTYPES.get(item.dtype, "fp32") for item in parameters)
    trainable = [item for item in parameters if item.requires_grad]
    optimizers = list(record.optimizers.values())
    name = type(optimizers[0]).__name__ if optimizers else "another library's"
    if name not in OPTIMIZERS:
        uses = gpu.tracer.trace.uses
        state_bytes = sum(size for block, size in gpu.memory.live_blocks() if uses[block] == Use.OPTIMIZER_STATE)
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
