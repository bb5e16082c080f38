"""From a virtual GPU that a script has used to a report: peaks on each device, layers, lines, steps."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from vramcast.dataset_builder.run.report import LineCost, PhasePeak, RunReport, StepPeak
from vramcast.dataset_builder.simulation.live_simulation import simulation_of_run, unbounded
from vramcast.dataset_builder.simulation.simulation import Curve
from vramcast.errors import UserError
from vramcast.virtual_gpu.allocator import AllocatorOptions
from vramcast.virtual_gpu.cuda.run_record import PHASES, RunRecord
from vramcast.virtual_gpu.cuda.virtual_cuda import VirtualCuda
from vramcast.virtual_gpu.length_orders import TRACED_STEPS, LengthOrders
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.replay import FREE, Replay
from vramcast.virtual_gpu.simulate import Lowered, replay_on
from vramcast.virtual_gpu.timeline import timeline_of
from vramcast.virtual_gpu.varying_lengths import StepsDifferError, VaryingRun

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
    internal: bool = False,
    ran_out_of_memory: bool = False,
    timed_out: bool = False,
    overlay_refused: bool = False,
    seconds: float = 0.0,
    orders: LengthOrders | None = None,
) -> RunReport:
    """Return the report of a run; `others` are devices that its trace is replayed on."""
    trace, record = gpu.tracer.trace, gpu.record
    lowered, replayed = replay_on(trace, unbounded(gpu.profile), gpu.options)
    simulation = None
    if record.roots and trace.events:
        simulation = simulation_of_run(gpu, others, lowered, replayed, ran_out_of_memory)
    _, expandable = replay_on(trace, unbounded(gpu.profile), AllocatorOptions(expandable_segments=True))
    return RunReport(
        simulation=simulation,
        ending=ending,
        failure=failure,
        traceback=traceback,
        internal=internal,
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
        world_size=trace.world_size,
        rank_groups=gpu.ranks.groups(record.roots.values()) if gpu.ranks else (),
        operators=gpu.tracer.operators,
        seconds=seconds,
        timed_out=timed_out,
        overlay_refused=overlay_refused,
        curve=_curve(gpu),
        reserved_by_order=_reserved_by_order(gpu, orders) if orders else (),
    )


def _reserved_by_order(gpu: VirtualCuda, orders: LengthOrders) -> tuple[int | None, ...]:
    """Replay orders of batches with the steps of the script, which had the lengths to be traced and one step more."""
    starts: dict[int, list[int]] = {}
    for step, event in gpu.record.batch_starts:
        starts.setdefault(step, []).append(event)
    if len(starts) <= TRACED_STEPS:
        raise UserError(f"expected {TRACED_STEPS + 1} steps, found {len(starts)}: change the script")
    trace = replace(gpu.tracer.trace, events=gpu.tracer.trace.events[: starts[TRACED_STEPS][0]])
    steps = [starts[step] for step in range(TRACED_STEPS)]
    try:
        run = VaryingRun(trace, gpu.profile, steps, orders.traced)
    except StepsDifferError as error:
        raise UserError(f"expected steps that differ in length alone, found that {error}: replay no orders") from error
    return tuple(run.reserved_bytes(order, orders.accumulate, gpu.options) for order in orders.orders)


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


def highest_points(totals: Sequence[int]) -> list[int]:
    """Return the highest point of each of some hundred equal stretches, so that no peak is lost."""
    count = len(totals)
    if count <= _CURVE_POINTS:
        return list(range(count))
    bounds = [index * count // _CURVE_POINTS for index in range(_CURVE_POINTS + 1)]
    return [max(range(start, end), key=totals.__getitem__) for start, end in pairwise(bounds)]
