"""The report of a run as HTML for notebooks. All texts are escaped: a script may name its files in any way."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from vramcast.virtual_gpu.allocator.sizes import MIB

if TYPE_CHECKING:
    from vramcast.simulation.scripts.report import RunReport, StepPeak

_MOST_LINES = 5
_MOST_NOTES = 12
_FIGURE = "text-align: right"


def report_html(report: "RunReport") -> str:
    """Return tables of phases, steps and lines, and a list of what was assumed."""
    parts = [_ending(report), _phases(report), _steps(report), _lines(report), _notes(report)]
    return f"<div>{''.join(parts)}</div>"


def shown_shapes(shapes: Sequence[Sequence[int]], most: int = 4) -> str:
    """Return the shapes of a batch, each whole, and how many others there are."""
    texts = ["x".join(map(str, shape)) or "scalar" for shape in shapes[:most]]
    others = [f"and {len(shapes) - most} more"] if len(shapes) > most else []
    return ", ".join([*texts, *others])


def _ending(report: "RunReport") -> str:
    text = f"{report.ending}; {len(report.steps)} steps, {report.operators:,} operators, {report.seconds:.1f} s"
    failure = f"<p><b>{escape(report.failure)}</b></p>" if report.failure else ""
    missing = "".join(f"<p>not reached: {escape(phase)}</p>" for phase in report.missing)
    return f"<p>The run: {escape(text)}</p>{failure}{missing}"


def _phases(report: "RunReport") -> str:
    rows = [
        (
            item.phase,
            _mib(item.allocated_bytes),
            _mib(item.reserved_bytes),
            f"{item.count:,}" if item.count else "yes",
        )
        for item in report.phases
    ]
    return _table("Peaks by phase", ("phase", "allocated", "reserved", "seen"), rows)


def _steps(report: "RunReport") -> str:
    named = (("first", report.first_step), ("largest after", report.steady_step))
    rows = [_step(name, step) for name, step in named if step is not None]
    return _table("Steps", ("step", "allocated", "reserved", "peak in", "first batch"), rows)


def _step(name: str, step: "StepPeak") -> tuple[str, ...]:
    return name, _mib(step.allocated_bytes), _mib(step.reserved_bytes), step.phase, shown_shapes(step.shapes)


def _lines(report: "RunReport") -> str:
    rows = [(item.place, _mib(item.held_bytes)) for item in report.lines[:_MOST_LINES]]
    return _table("Lines that hold most at the peak", ("line", "holds"), rows)


def _notes(report: "RunReport") -> str:
    if not report.assumptions:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in report.assumptions[:_MOST_NOTES])
    more = len(report.assumptions) - _MOST_NOTES
    rest = f"<li>and {more} more: see <code>assumptions</code></li>" if more > 0 else ""
    return f"<p>Assumed</p><ul>{items}{rest}</ul>"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:,.1f} MiB"


def _table(caption: str, head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table, or nothing without rows; figures are aligned on the right."""
    cells = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f"<table><caption>{escape(caption)}</caption><tr>{names}</tr>{cells}</table>" if cells else ""


def _cell(text: str) -> str:
    style = f' style="{_FIGURE}"' if text.endswith(" MiB") else ""
    return f"<td{style}>{escape(text)}</td>"
