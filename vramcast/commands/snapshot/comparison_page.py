"""A recording beside a simulated run, as text and as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.recordings.alignment import Alignment, Difference


def rendered_comparison(name: str, result: Alignment, lines: int = 12) -> str:
    """Return the page of a comparison."""
    return "\n".join(_page(name, result, lines)) + "\n"


def _page(name: str, result: Alignment, lines: int) -> Iterator[str]:
    part = result.equal / max(result.recorded, 1)
    yield f"{name}: {result.equal:,} of {result.recorded:,} recorded allocations ({part:.2%}) are in the run, in order"
    yield f"The recording begins at allocation {result.first:,} of the run. Peaks over that part:"
    rows = (
        ("allocated", result.recorded_allocated_bytes, result.simulated_allocated_bytes, result.allocated_error),
        ("reserved", result.recorded_reserved_bytes, result.simulated_reserved_bytes, result.reserved_error),
    )
    yield f"  {'':<10} {'recorded':>14} {'simulated':>14} {'error':>9}"
    for title, recorded, simulated, error in rows:
        yield f"  {title:<10} {recorded / MIB:>10,.1f} MiB {simulated / MIB:>10,.1f} MiB {error:>+9.3%}"
    yield from _differences("Missing in the run", result.missing, lines)
    yield from _differences("Too much in the run", result.surplus, lines)


def _differences(title: str, differences: Sequence[Difference], lines: int) -> Iterator[str]:
    if not differences:
        yield f"{title}: nothing"
        return
    count, size = sum(item.count for item in differences), sum(item.size_bytes for item in differences)
    yield f"{title}: {count:,} allocations, {size / MIB:,.2f} MiB in all"
    for item in differences[:lines]:
        yield f"  {item.count:>7,} x  {item.size_bytes / MIB:>12,.2f} MiB  {item.operator or 'unknown'}  {item.line}"
    if len(differences) > lines:
        yield f"  and {len(differences) - lines} more lines (--lines)"


def comparison_json(name: str, result: Alignment) -> dict[str, Any]:
    """Return the comparison for programs: sizes in bytes."""
    errors = {"allocated_error": result.allocated_error, "reserved_error": result.reserved_error}
    return {"file": name, **asdict(result), **errors}
