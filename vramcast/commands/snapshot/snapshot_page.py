"""The findings about a memory snapshot as text and as JSON."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.recordings.agreement import ReplayAgreement
from vramcast.virtual_gpu.recordings.contents import BlockKind, Contents
from vramcast.virtual_gpu.recordings.examination import Examination
from vramcast.virtual_gpu.recordings.failures import Failure, Remedy

if TYPE_CHECKING:
    from vramcast.virtual_gpu.profile import DeviceProfile
    from vramcast.virtual_gpu.recordings.profiler_traces import ProfiledMemory

_BAR = 24


def rendered(name: str, examined: Sequence[Examination], profile: "DeviceProfile | None", lines: int = 12) -> str:
    """Return the page of a snapshot."""
    if not examined:
        return f"{name}: no device holds memory or has a history\n"
    return "\n".join(f"{line}" for item in examined for line in _page(name, item, profile, lines)) + "\n"


def _page(name: str, item: Examination, profile: "DeviceProfile | None", lines: int) -> Iterator[str]:
    since = "from the first allocation" if item.starts_empty else "the history before them is cut"
    yield f"{name}, GPU {item.device}: {item.events:,} events, {since}"
    yield from _replay(item)
    yield ""
    if item.failure is None:
        yield _head("Peak", item.peak)
        yield from _contents(item.peak, lines)
        yield from _without_failure(item)
        return
    failure = item.failure
    yield f"Out of memory at event {failure.event:,}: {_mib(failure.requested_bytes)} requested"
    yield from _reasons(failure, profile)
    yield ""
    yield _head("Contents at the failure", failure.contents)
    yield from _contents(failure.contents, lines)
    yield from _remedies(item.remedies, failure)


def _replay(item: Examination) -> Iterator[str]:
    """Yield the trust in the figures below."""
    replay = item.replay
    if item.events == 0:
        yield "No history: call torch.cuda.memory._record_memory_history() before the job. This is the last state."
    elif replay.agrees:
        count = replay.addresses.recorded
        yield f"Replayed: all {count:,} addresses, all segments and all last blocks are as recorded."
    else:
        equal = f"{replay.addresses.equal:,} of {replay.addresses.recorded:,} addresses are as recorded"
        pools = "; private pools of CUDA graphs are not simulated" if item.private_pools else ""
        yield f"Replayed: {equal}{pools}. Results of other settings are approximate. First difference: "
        yield f"  {replay.first_difference}"


def _head(title: str, contents: Contents) -> str:
    place = f"after event {contents.event:,}" if contents.event >= 0 else "before the first event"
    return f"{title}, {place}: {_mib(contents.allocated_bytes)} allocated, {_mib(contents.reserved_bytes)} reserved"


def _contents(contents: Contents, most: int) -> Iterator[str]:
    parts = [
        *contents.by_kind.items(),
        ("rounding", contents.rounding_bytes),
        ("cache: whole segments", contents.cached_segment_bytes),
        ("cache: between blocks", contents.split_bytes),
    ]
    for name, size in parts:
        if size:
            part = size / max(contents.reserved_bytes, 1)
            yield f"  {name:<22} {_mib(size):>12} {part:6.1%}  {'#' * round(_BAR * part)}".rstrip()
    if contents.split_bytes:
        yield (
            f"  {_mib(contents.split_bytes)} is fragmentation: free, but in segments that hold a block in use. The "
            f"largest free block has {_mib(contents.largest_free_bytes)}."
        )
    if contents.cached_segment_bytes:
        yield f"  {_mib(contents.cached_segment_bytes)} is cache that torch.cuda.empty_cache() would return."
    if str(BlockKind.BEFORE) in contents.by_kind:
        yield "  Blocks from before the recording have no stack: record from the start of the script."
    yield ""
    yield "Held by line"
    for (line, operator), size in list(contents.by_line.items())[:most]:
        if size:
            yield f"  {_mib(size):>12}  {line or 'unknown'}{f'  ({operator})' if operator else ''}"


def _without_failure(item: Examination) -> Iterator[str]:
    recorded = item.replay.recorded_peak_bytes
    yield ""
    yield f"Highest over the history: {_mib(item.replay.peak_allocated_bytes)} allocated, {_mib(recorded)} reserved"
    if item.expandable_reserved_bytes is None:
        return
    if item.expandable_reserved_bytes < recorded:
        saved = _mib(recorded - item.expandable_reserved_bytes)
        yield (
            f"With PYTORCH_ALLOC_CONF=expandable_segments:True it would be {_mib(item.expandable_reserved_bytes)} "
            f"reserved, {saved} less (the stream replayed)."
        )
    else:
        yield "Expandable segments would not lower it (the stream replayed)."


def _reasons(failure: Failure, profile: "DeviceProfile | None") -> Iterator[str]:
    contents = failure.contents
    cache = contents.reserved_bytes - contents.allocated_bytes
    yield (
        f"  The allocator asked the device for {_mib(failure.segment_bytes)}, and "
        f"{_mib(failure.device_free_bytes)} were free."
    )
    yield (
        f"  This process held {_mib(contents.reserved_bytes)}: {_mib(contents.allocated_bytes)} in use, "
        f"{_mib(cache)} in free blocks, the largest of {_mib(contents.largest_free_bytes)}."
    )
    if failure.is_limited:
        yield "  The device had room: a limit of the process refused it (set_per_process_memory_fraction)."
    elif failure.is_fragmentation:
        yield (
            f"  Fragmentation: all free memory together is {_mib(failure.device_free_bytes + cache)}, enough for the "
            "request, but not in one piece."
        )
    else:
        yield f"  Need: {_mib(failure.lacks_bytes)} more than the device has for this process, even without any cache."
    if profile is not None:
        rest = profile.total_mib * MIB - failure.capacity_bytes
        yield (
            f"  Of the {profile.total_mib:,} MiB of the {profile.title}, {_mib(failure.capacity_bytes)} were "
            f"there for this process; {_mib(max(rest, 0))} belong to CUDA contexts and other processes."
        )
    else:
        yield (
            f"  {_mib(failure.capacity_bytes)} of the device were there for this process; --device NAME tells how much "
            "others held."
        )


def _remedies(remedies: Sequence[Remedy], failure: Failure) -> Iterator[str]:
    yield ""
    yield "The recorded stream, replayed under other settings"
    for remedy in _shown(remedies):
        if remedy.completes:
            result = f"passes, {_mib(remedy.peak_reserved_bytes)} reserved"
        elif remedy.passes:
            result = "passes, a later allocation fails"
        else:
            result = "fails"
        yield f"  {remedy.name:<20} {result:<34} {remedy.setting}"
    if not any(remedy.passes for remedy in remedies):
        yield f"  None of them helps: the job needs {_mib(max(failure.lacks_bytes, 0))} more, or less to hold."


def _shown(remedies: Sequence[Remedy]) -> Iterator[Remedy]:
    """Yield the first remedy of each kind that passes, or the last that was tried."""
    for name in dict.fromkeys(remedy.name for remedy in remedies):
        tried = [remedy for remedy in remedies if remedy.name == name]
        yield next((remedy for remedy in tried if remedy.completes), tried[-1])


def _mib(size_bytes: int) -> str:
    """Return a size in MiB, or in bytes below one."""
    return f"{size_bytes / MIB:,.0f} MiB" if size_bytes >= MIB else f"{size_bytes:,} bytes"


def to_json(name: str, examined: Sequence[Examination], profile: "DeviceProfile | None") -> dict[str, Any]:
    """Return the findings for programs: sizes in bytes."""
    return {"file": name, "devices": [_device_json(item, profile) for item in examined]}


def _device_json(item: Examination, profile: "DeviceProfile | None") -> dict[str, Any]:
    values: dict[str, Any] = {
        "device": item.device,
        "events": item.events,
        "starts_empty": item.starts_empty,
        "private_pools": item.private_pools,
        "peak_allocated_bytes": item.replay.peak_allocated_bytes,
        "peak_reserved_bytes": item.replay.recorded_peak_bytes,
        "expandable_reserved_bytes": item.expandable_reserved_bytes,
        "replay": _replay_json(item.replay),
        "peak": _contents_json(item.peak),
        "failure": None,
        "remedies": [asdict(remedy) for remedy in item.remedies],
    }
    if item.failure is not None:
        failure = {key: value for key, value in vars(item.failure).items() if key != "contents"}
        values["failure"] = {
            **failure,
            "lacks_bytes": item.failure.lacks_bytes,
            "is_fragmentation": item.failure.is_fragmentation,
            "is_limited": item.failure.is_limited,
            "outside_bytes": profile.total_mib * MIB - item.failure.capacity_bytes if profile else None,
            "contents": _contents_json(item.failure.contents),
        }
    return values


def _replay_json(replay: ReplayAgreement) -> dict[str, Any]:
    tallies = ("addresses", "segments_made", "segments_freed", "final_blocks")
    return {
        "agrees": replay.agrees,
        **{name: asdict(getattr(replay, name)) for name in tallies},
        "first_difference": replay.first_difference,
    }


def _contents_json(contents: Contents) -> dict[str, Any]:
    lines = [{"line": line, "operator": name, "bytes": size} for (line, name), size in contents.by_line.items()]
    return {**vars(contents), "by_line": lines}


def profiler_page(name: str, profiled: Sequence["ProfiledMemory"], as_json: bool) -> str:
    """Return the page of a trace of torch.profiler, or its JSON."""
    if as_json:
        devices = [
            {
                "device": item.device,
                "events": item.events,
                "peak_allocated_bytes": item.peak_allocated_bytes,
                "peak_reserved_bytes": item.peak_reserved_bytes,
                "largest_at_peak": [{"bytes": size, "count": count} for size, count in item.largest_at_peak],
            }
            for item in profiled
        ]
        return json.dumps({"file": name, "devices": devices}) + "\n"
    return "\n".join(line for item in profiled for line in _profiled(name, item)) + "\n"


def _profiled(name: str, item: "ProfiledMemory") -> Iterator[str]:
    yield f"{name}, GPU {item.device}: {item.events:,} memory events of torch.profiler, without segments and stacks"
    yield f"Peak: {_mib(item.peak_allocated_bytes)} allocated, {_mib(item.peak_reserved_bytes)} reserved"
    yield "Blocks at the peak that the trace saw"
    for size, count in item.largest_at_peak[:12]:
        yield f"  {_mib(size * count):>12}  {count:,} x {_mib(size)}"
