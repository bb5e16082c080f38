"""From a virtual GPU that a script has used to a report: peaks on each device, layers, lines, steps."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from vramcast.errors import UserError
from vramcast.simulation.emulated_simulation import simulation_of_run
from vramcast.simulation.replays import Replays, UnboundedReplay, curve_of
from vramcast.simulation.scripts.report import LineCost, PhasePeak, RunReport, StepPeak
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.cuda.emulation import CudaEmulation
from vramcast.virtual_gpu.cuda.run_record import PHASES, RunRecord
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.replay.length_orders import TRACED_STEPS, LengthOrders
from vramcast.virtual_gpu.replay.replay import FREE
from vramcast.virtual_gpu.replay.varying_lengths import StepsDifferError, VaryingRun

_MOST_LINES = 10


def report_of(
    gpu: CudaEmulation,
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
    has_stopped: bool = False,
    missing: Sequence[str] = (),
) -> RunReport:
    """Return the report of a run; `others` are devices that its trace is replayed on."""
    trace, record = gpu.tracer.trace, gpu.record
    replays = Replays(gpu.options)
    simulation = None
    if (record.roots or record.evaluated) and trace.events:
        simulation = simulation_of_run(gpu, others, replays, ran_out_of_memory)
    expandable = Replays(AllocatorOptions(expandable_segments=True)).unbounded(trace, gpu.profile).replay
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
        lines=_lines(gpu, replays.unbounded(trace, gpu.profile)),
        assumptions=tuple(map(str, gpu.assumptions.all())),
        unwritten=tuple(gpu.unwritten),
        missing=tuple(missing),
        has_trained=bool(record.roots),
        forwarded_after=gpu.forward.cut_after,
        has_stopped=has_stopped,
        survived_ooms=len(gpu.memory.ooms) - ran_out_of_memory,
        expandable_reserved_bytes=None if gpu.options.expandable_segments else expandable.peak_reserved_bytes,
        world_size=trace.world_size,
        rank_groups=gpu.ranks.groups((record.roots or record.evaluated).values()) if gpu.ranks else (),
        operators=gpu.tracer.operators,
        seconds=seconds,
        timed_out=timed_out,
        overlay_refused=overlay_refused,
        curve=curve_of(trace, gpu.profile, gpu.options) if trace.events else None,
        reserved_by_order=_reserved_by_order(gpu, orders) if orders else (),
    )


def _reserved_by_order(gpu: CudaEmulation, orders: LengthOrders) -> tuple[int | None, ...]:
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
    counts = {**record.calls, "optimizer": len(record.steps)}
    return tuple(
        PhasePeak(
            phase, record.by_phase[phase].allocated_bytes, record.by_phase[phase].reserved_bytes, counts.get(phase)
        )
        for phase in PHASES
        if phase in record.by_phase
    )


def _lines(gpu: CudaEmulation, unbounded: UnboundedReplay) -> tuple[LineCost, ...]:
    """Return the lines of the user's code whose blocks are alive at the peak, the costliest first."""
    live, places = set(unbounded.replay.live_at_peak), gpu.tracer.source_lines
    held: Counter[str] = Counter()
    for block, size in unbounded.lowered.events:
        if size != FREE and block in live and (place := places[block]):
            held[place] += size
    return tuple(LineCost(place, size) for place, size in held.most_common(_MOST_LINES))
