"""Memory snapshots in PyTorch's format, which https://pytorch.org/memory_viz opens.

The format is that of torch.cuda.memory._snapshot (torch/csrc/cuda/memory_snapshot.cpp).
"""

from collections.abc import Sequence
from typing import Any

from vramcast.virtual_gpu.allocator.allocator import MAIN_STREAM, AllocatorOptions, Block, CachingAllocator, OutOfMemory
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.allocator.state import BlockState
from vramcast.virtual_gpu.allocator.streams import apply_operation
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.replay.replay import FREE, STREAM_OPERATION
from vramcast.virtual_gpu.replay.simulate import lower
from vramcast.virtual_gpu.tracing.trace import Trace, Use


def snapshot_of(
    trace: Trace, source_lines: Sequence[str | None], profile: DeviceProfile, options: AllocatorOptions
) -> dict[str, Any]:
    """Return the snapshot of a trace on a device: its last state, and all allocations on the way there."""
    capacity_bytes = profile.capacity_bytes(trace.has_convolutions, trace.has_batch_norm)
    allocator = CachingAllocator(capacity_bytes, options, total_bytes=profile.total_mib * MIB)
    history: list[dict[str, Any]] = []
    blocks: dict[int, Block] = {}
    names: dict[int, list[dict[str, Any]]] = {}
    for time, (block, size) in enumerate(lower(trace, profile).events):
        if block < 0:
            if block == STREAM_OPERATION:
                apply_operation(trace.stream_operations[size], allocator, blocks)
            else:
                allocator.empty_cache()
        elif size == FREE:
            handle = blocks.pop(block, None)
            if handle is not None and handle.allocated:
                history.append(_entry("free_completed", handle, time, []))
                allocator.free(handle)
        else:
            frames = _frames(trace, source_lines, block)
            try:
                blocks[block] = allocator.malloc(size, trace.streams.get(block, MAIN_STREAM))
            except OutOfMemory:
                history.append({"action": "oom", "size": size, "stream": 0, "frames": frames, "time_us": time})
                break
            names[blocks[block].address] = frames
            history.append(_entry("alloc", blocks[block], time, frames))
    return {
        "segments": segments_of(allocator, names),
        "device_traces": [history],
        "allocator_settings": {},
        "external_annotations": [],
    }


def segments_of(allocator: CachingAllocator, frames: dict[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the segments of an allocator as torch.cuda.memory_snapshot does."""
    return [
        {
            "device": 0,
            "address": segment.address,
            "total_size": segment.size_bytes,
            "allocated_size": sum(b.size_bytes for b in segment.blocks if b.state is BlockState.ALLOCATED),
            "active_size": sum(b.size_bytes for b in segment.blocks if b.state is BlockState.ALLOCATED),
            "requested_size": sum(b.requested_bytes for b in segment.blocks),
            "stream": 0,
            "segment_type": "small" if segment.small else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": allocator.options.expandable_segments,
            "frames": [],
            "blocks": [
                {
                    "address": block.address,
                    "size": block.size_bytes,
                    "requested_size": block.requested_bytes,
                    "state": block.state.value,
                    "frames": frames.get(block.address, []) if block.state is BlockState.ALLOCATED else [],
                }
                for block in segment.blocks
            ],
        }
        for segment in allocator.segments()
    ]


def _entry(action: str, block: Block, time: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "action": action,
        "addr": block.address,
        "size": block.requested_bytes,
        "stream": 0,
        "frames": frames,
        "time_us": time,
    }


def _frames(trace: Trace, source_lines: Sequence[str | None], block: int) -> list[dict[str, Any]]:
    """Return the layer of a block and the user's line, innermost first."""
    place = source_lines[block] if block < len(source_lines) else None
    use = Use(trace.uses[block]).name.lower()
    frames = [{"filename": trace.owners[block] or "no layer", "line": 0, "name": use}]
    if place:
        filename, _, line = place.rpartition(":")
        frames.append({"filename": filename, "line": int(line), "name": "script"})
    return frames
