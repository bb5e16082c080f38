"""The memory snapshot of a trace, in PyTorch's format."""

from collections.abc import Sequence
from typing import Any

from vramcast.virtual_gpu.allocator.allocator import MAIN_STREAM, AllocatorOptions, Block
from vramcast.virtual_gpu.allocator.streams import apply_operation
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.recordings.recorder import Frames, RecordedAllocator
from vramcast.virtual_gpu.replay.replay import FREE, STREAM_OPERATION
from vramcast.virtual_gpu.replay.simulate import lower
from vramcast.virtual_gpu.tracing.trace import Trace, Use


def snapshot_of(
    trace: Trace,
    source_lines: Sequence[str | None],
    operators: Sequence[str],
    profile: DeviceProfile,
    options: AllocatorOptions,
) -> dict[str, Any]:
    """Return the snapshot of a trace on a device: its last state, and all allocations on the way there."""
    capacity_bytes = profile.capacity_bytes(trace.has_convolutions, trace.has_batch_norm)
    recorded = RecordedAllocator(capacity_bytes, options, profile.available_bytes)
    lowered = lower(trace, profile)
    blocks: dict[int, Block] = {}
    for time, (block, size) in enumerate(lowered.events):
        recorded.time_us = time
        if block < 0:
            if block == STREAM_OPERATION:
                apply_operation(trace.stream_operations[size], recorded.allocator, blocks)
                recorded.note_device([])
            else:
                recorded.empty_cache()
        elif size == FREE:
            handle = blocks.pop(block, None)
            if handle is not None and handle.allocated:
                recorded.free(handle)
        else:
            frames = _frames(trace, source_lines, operators, block)
            handle = recorded.malloc(size, trace.streams.get(block, MAIN_STREAM), frames)
            if handle is not None:
                blocks[block] = handle
            elif block not in lowered.workspaces:
                break
    return recorded.snapshot()


def _frames(trace: Trace, source_lines: Sequence[str | None], operators: Sequence[str], block: int) -> Frames:
    """Return the layer of a block, its operator and the user's line, innermost first."""
    place = source_lines[block] if block < len(source_lines) else None
    use = Use(trace.uses[block]).name.lower()
    frames = [{"filename": trace.owners[block] or "no layer", "line": 0, "name": use}]
    if block < len(operators) and operators[block]:
        frames.append({"filename": "??", "line": 0, "name": f"at::_ops::{operators[block]}::call"})
    if place:
        filename, _, line = place.rpartition(":")
        frames.append({"filename": filename, "line": int(line), "name": "script"})
    return frames
