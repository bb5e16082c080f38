"""A pass for one batch size on one device: its events as lists, without the blocks of the small pool."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vramcast.jobs.analysis.schedule.step import Events, Pass
from vramcast.jobs.analysis.schedule.workspaces import Call, workspace_bytes
from vramcast.virtual_gpu.allocator.sizes import MIN_BLOCK_BYTES, SMALL_SIZE_BYTES
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.replay.replay import FREE, Event

Sizes = NDArray[np.int64]
_MOST_BYTES = 2**45
"""Of a block: more than any device has, and few enough for sums in 64 bits. Tables may hold any numbers."""


@dataclass(frozen=True)
class PlacedPart:
    """The events of a forward or a backward pass."""

    large: list[Event]
    calls: dict[int, list[Call]]
    """Calls of convolutions by the index in `large` that they come before."""
    small_peak: int
    """Bytes of the small pool above those at the start, at their peak."""
    small_net: int
    """The same at the end."""


@dataclass(frozen=True)
class PlacedPass:
    """A pass in bytes."""

    forward: PlacedPart
    backward: PlacedPart
    backward_again: PlacedPart
    """That of a later batch of a step, whose gradients are added to those that are there one by one."""
    output: int | None
    output_bytes: int
    gradients: list[int]
    """Large blocks of the parameters' gradients."""
    small_gradient_bytes: int
    kept_bytes: int
    """Live after the forward pass."""


def placed(passed: Pass, batch: int, profile: DeviceProfile) -> PlacedPass:
    """Return a pass for a batch size on a device."""
    block_bytes = np.zeros(passed.blocks, dtype=np.int64)
    parts = [_sized(events, batch, profile, block_bytes) for events in (passed.forward, passed.backward)]
    small = block_bytes <= SMALL_SIZE_BYTES
    rounded = -(-block_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
    forward, backward = (
        _part(events, signs, small, block_bytes, rounded)
        for events, signs in zip((passed.forward, passed.backward), parts, strict=True)
    )
    gradients = [block for block, _ in passed.gradients]
    small_gradient_bytes = int(sum(rounded[block] for block in gradients if small[block]))
    large_gradients = [block for block in gradients if not small[block]]
    output = passed.output
    return PlacedPass(
        forward, backward, _added(backward, set(large_gradients), small_gradient_bytes),
        output=None if output is None or small[output] else output,
        output_bytes=0 if output is None else int(rounded[output]),
        gradients=large_gradients,
        small_gradient_bytes=small_gradient_bytes,
        kept_bytes=int((rounded[passed.forward.blocks] * parts[0]).sum()),
    )  # fmt: skip


def _sized(events: Events, batch: int, profile: DeviceProfile, block_bytes: Sizes) -> Sizes:
    """Enter the sizes of the blocks that events allocate; return 1 for each allocation and -1 for each free."""
    signs = np.array([-1 if size is None else 1 for size in events.sizes], dtype=np.int64)
    for block, size in zip(events.blocks, events.sizes, strict=True):
        if size is not None:
            block_bytes[block] = min(size[0] * batch + size[1], _MOST_BYTES)
    for index, call in events.calls.items():
        block_bytes[events.blocks[index]] = min(workspace_bytes(profile, call, batch), _MOST_BYTES)
    return signs


def _part(events: Events, signs: Sizes, small: NDArray[np.bool_], block_bytes: Sizes, rounded: Sizes) -> PlacedPart:
    blocks = np.array(events.blocks, dtype=np.int64)
    if not len(blocks):
        return PlacedPart([], {}, 0, 0)
    is_small = small[blocks]
    running = np.cumsum(np.where(is_small, signs * rounded[blocks], 0))
    chosen = np.flatnonzero(~is_small)
    sizes = np.where(signs[chosen] > 0, block_bytes[blocks[chosen]], FREE)
    calls: dict[int, list[Call]] = {}
    for index, call in events.calls.items():
        calls.setdefault(int(np.searchsorted(chosen, index)), []).append(call)
    large = list(zip(blocks[chosen].tolist(), sizes.tolist(), strict=True))
    return PlacedPart(large, calls, max(int(running.max()), 0), int(running[-1]))


def _added(part: PlacedPart, gradients: set[int], small_bytes: int) -> PlacedPart:
    """Return a part in which gradients of parameters are freed as soon as they are there."""
    events: list[Event] = []
    for event in part.large:
        events.append(event)
        if event[0] in gradients:
            events.append((event[0], FREE))
    return PlacedPart(events, {}, max(part.small_peak - small_bytes, 0), part.small_net - small_bytes)


def total_bytes(sizes: Sequence[int]) -> int:
    """Return the bytes of blocks in the small pool."""
    return sum(-(-size // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES for size in sizes)
