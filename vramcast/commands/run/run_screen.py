"""The report of a run as text and as JSON: the answer of `classify`, and the course of the run."""

from collections.abc import Iterator, Sequence
from typing import Any

from vramcast.commands.classify.page import Page, render_page
from vramcast.commands.wrapping import wrapped
from vramcast.models.answer import Answer, shown_size
from vramcast.models.json_figures import rounded
from vramcast.simulation.sandbox.file_protection.changes import Changes
from vramcast.simulation.scripts.report import RunReport, StepPeak
from vramcast.simulation.scripts.report_html import shown_shapes
from vramcast.virtual_gpu.allocator.sizes import MIB

_MOST_STEPS = 8
_MOST_NOTES = 12


def rendered_run(page: Page, report: RunReport, width: int = 100, colours: bool = False) -> str:
    """Return the page of the answer with the course of the run below."""
    parts = [
        _ending(report),
        _devices_of_process(report),
        _phases(report),
        _steps(report),
        _lines(report),
        _help(page.answer, report),
    ]
    parts += [_files(report.changes), _assumptions(report, width)]
    text = "\n\n".join("\n".join(lines) for part in parts if (lines := list(part)))
    return f"{render_page(page, width, colours)}\n{text}\n"


def to_json(answer: Answer, report: RunReport, devices: Sequence[Answer] = ()) -> dict[str, Any]:
    """Return the answer's JSON with the course of the run under 'run'."""
    first, steady = report.first_step, report.steady_step
    run = {
        "ending": report.ending,
        "forwarded_after": report.forwarded_after,
        "missing": list(report.missing),
        "failure": report.failure,
        "ran_out_of_memory": report.ran_out_of_memory,
        "phases_mib": {
            item.phase: {
                "allocated": item.allocated_bytes / MIB,
                "reserved": item.reserved_bytes / MIB,
                "count": item.count,
            }
            for item in report.phases
        },
        "devices_of_process": [
            {
                "device": f"cuda:{item.rank}",
                "allocated_mib": item.allocated_bytes / MIB,
                "reserved_mib": item.reserved_bytes / MIB,
            }
            for item in report.devices
        ],
        "first_step_mib": first.allocated_bytes / MIB if first else None,
        "steady_step_mib": steady.allocated_bytes / MIB if steady else None,
        "steps": [
            {
                "allocated_mib": item.allocated_bytes / MIB,
                "reserved_mib": item.reserved_bytes / MIB,
                "phase": item.phase,
                "shapes": [list(shape) for shape in item.shapes],
            }
            for item in report.steps
        ],
        "devices": [
            {
                "device": item.device,
                "verdict": item.verdict,
                "estimate_mib": item.estimate_mib,
                "safe_mib": item.safe_mib,
                "notes": list(item.notes),
            }
            for item in devices
        ],
        "lines": [{"place": item.place, "mib": item.held_bytes / MIB} for item in report.lines],
        "fragmentation": fragmentation(answer),
        "expandable_reserved_mib": (report.expandable_reserved_bytes or 0) / MIB or None,
        "assumptions": list(report.assumptions),
        "files": report.changes.to_json(),
        "unwritten": list(report.unwritten),
        "survived_ooms": report.survived_ooms,
        "operators": report.operators,
        "script_seconds": report.seconds,
    }
    return {**answer.to_dict(), "run": rounded(run)}


def fragmentation(answer: Answer) -> float | None:
    """Return the part of the reserved peak that no tensor held."""
    if not answer.reserved_mib or answer.allocated_mib is None:
        return None
    return 1 - answer.allocated_mib / answer.reserved_mib


def _ending(report: RunReport) -> Iterator[str]:
    steps = f"{len(report.steps)} step{'s' * (len(report.steps) != 1)}"
    yield f"The run: {report.ending}; {steps}, {report.operators:,} operators, {report.seconds:.1f} s"
    if report.forwarded_after is not None:
        yield f"  loops end early from step {report.forwarded_after} on, to reach what follows"
    if report.failure:
        yield f"  {report.failure}"
    if report.survived_ooms:
        yield f"  {report.survived_ooms} allocations failed, which the script handled"


def _devices_of_process(report: RunReport) -> Iterator[str]:
    if report.devices:
        yield f"{'Device':15} {'allocated':>12} {'reserved':>12}"
    for item in report.devices:
        yield f"  cuda:{item.rank:<8} {_figures(item.allocated_bytes, item.reserved_bytes)}"


def _phases(report: RunReport) -> Iterator[str]:
    if report.phases:
        yield f"{'Phase':15} {'allocated':>12} {'reserved':>12}  seen"
    for item in report.phases:
        unit = "step" if item.phase == "optimizer" else "call"
        seen = f"{item.count:,} {unit}{'s' * (item.count != 1)}" if item.count else "yes"
        yield f"  {item.phase:13} {_figures(item.allocated_bytes, item.reserved_bytes)}  {seen}"
    for phase in report.missing:
        yield f"  not reached: {phase}"


def _steps(report: RunReport) -> Iterator[str]:
    first, steady = report.first_step, report.steady_step
    if first is None:
        return
    yield f"{'Step':15} {'allocated':>12} {'reserved':>12}  peak in, first batch"
    yield _step("first", first)
    if steady is not None:
        yield _step("largest after", steady)
    if len({item.shapes for item in report.steps}) > 1:
        ranked = sorted(enumerate(report.steps, 1), key=lambda pair: -pair[1].allocated_bytes)
        for number, item in ranked[:_MOST_STEPS]:
            yield _step(f"{number}", item)


def _step(name: str, item: StepPeak) -> str:
    figures = _figures(item.allocated_bytes, item.reserved_bytes)
    return f"  {name:13} {figures}  {item.phase}, {shown_shapes(item.shapes)}"


def _figures(allocated_bytes: int, reserved_bytes: int) -> str:
    return f"{shown_size(allocated_bytes / MIB):>12} {shown_size(reserved_bytes / MIB):>12}"


def _lines(report: RunReport) -> Iterator[str]:
    if report.lines:
        yield "Lines of the script that hold most at the peak"
    for item in report.lines[:5]:
        yield f"  {item.place:60} {shown_size(item.held_bytes / MIB):>12}"


def _help(answer: Answer, report: RunReport) -> Iterator[str]:
    share = fragmentation(answer)
    expandable = report.expandable_reserved_bytes
    if share and expandable is not None and answer.reserved_mib and expandable / MIB < 0.98 * answer.reserved_mib:
        yield (
            f"{share:.0%} of the reserved memory is fragmentation or cache; with "
            f"PYTORCH_ALLOC_CONF=expandable_segments:True the run reserves {shown_size(expandable / MIB)}"
        )


def _files(changes: Changes) -> Iterator[str]:
    """Yield a line on the files that the script would have changed."""
    verbs = {"written": "would have been written", "deleted": "would have been deleted"}
    parts = [f"{_some(changes, name)} {verb}" for name, verb in verbs.items() if changes.count(name)]
    if parts:
        copied = f"; {_some(changes, 'copied')} stay on the disk" if changes.copied else ""
        yield f"Files: {', '.join(parts)}; the disk is as it was{copied}"
    for reason in changes.lost:
        yield f"  not written: {reason}"


def _some(changes: Changes, name: str) -> str:
    """Return the first path of a list, and how many others there are."""
    first, others = getattr(changes, name)[0], changes.count(name) - 1
    first = first if first.isprintable() else repr(first)
    return f"{first} and {others:,} {'other' if others == 1 else 'others'}" if others else first


def _assumptions(report: RunReport, width: int) -> Iterator[str]:
    notes = [*report.assumptions, *(f"{path} was not written: its tensors have no data" for path in report.unwritten)]
    if notes:
        yield "Assumed"
    for note in notes[:_MOST_NOTES]:
        yield from wrapped(f"- {note}", width - 2, initial_indent="  ", subsequent_indent="    ")
    if len(notes) > _MOST_NOTES:
        yield f"  and {len(notes) - _MOST_NOTES} more: see --json"
