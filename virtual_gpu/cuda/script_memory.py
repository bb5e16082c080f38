"""The memory of the virtual GPU while a script runs: events go through the caching allocator as they happen."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from vramcast.virtual_gpu.allocator.allocator import MAIN_STREAM, AllocatorOptions, Block, CachingAllocator, OutOfMemory
from vramcast.virtual_gpu.allocator.streams import apply_operation
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.replay.replay import FREE, STREAM_OPERATION, Event
from vramcast.virtual_gpu.tracing.trace import ConvolutionCall, Trace, call_of

Watcher = Callable[[int, int], None]
"""Called after each allocation with the allocated and the reserved bytes."""


class ScriptMemory:
    """Plays the events of a trace on an allocator, in order, and raises torch.OutOfMemoryError where a GPU would."""

    def __init__(self, trace: Trace, profile: DeviceProfile, options: AllocatorOptions, *, unbounded: bool) -> None:
        self.trace = trace
        self.profile = profile
        self.unbounded = unbounded
        capacity_bytes = None if unbounded else profile.capacity_bytes(False)
        self.allocator = CachingAllocator(capacity_bytes, options, total_bytes=profile.available_bytes)
        self.ooms: list[str] = []
        """The message of each allocation that failed, also of those that the script survived."""
        self.watchers: list[Watcher] = []
        self.after_oom: list[Callable[[], None]] = []
        self._blocks: dict[int, Block] = {}
        self._frees: deque[Event] = deque()
        self._lock = threading.RLock()
        self._busy = False

    def play(self, event: Event) -> None:
        """Play one event. A free may arrive in the midst of an allocation: the garbage collector runs at any time."""
        block, size = event
        if size == FREE and block >= 0:
            self._frees.append(event)
            if self._busy or not self._lock.acquire(blocking=False):
                return  # whoever allocates frees it first
            try:
                self._free_pending()
            finally:
                self._lock.release()
            return
        with self._lock:
            self._free_pending()
            self._busy = True
            try:
                self._play(block, size)
            finally:
                self._busy = False

    def after_fork(self) -> None:
        """Continue in a forked process: a thread that is not there may have held the lock."""
        self._lock, self._busy = threading.RLock(), False

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Keep events from being added: frees wait for the next allocation."""
        with self._lock:
            self._free_pending()
            self._busy = True
            try:
                yield
            finally:
                self._busy = False

    @property
    def overhead_bytes(self) -> int:
        """Return what the context and the libraries hold beside the allocator."""
        return self.profile.overhead_bytes(self.trace.has_convolutions, self.trace.has_batch_norm)

    @property
    def free_bytes(self) -> int:
        """Return what the driver would call free."""
        return max(self.profile.available_bytes - self.overhead_bytes - self.allocator.reserved_bytes, 0)

    def live_blocks(self) -> Iterator[tuple[int, int]]:
        """Yield the blocks that are allocated now, with the bytes that were requested."""
        for block, handle in self._blocks.items():
            yield block, handle.requested_bytes

    def _free_pending(self) -> None:
        while self._frees:
            event = self._frees.popleft()
            handle = self._blocks.pop(event[0], None)
            if handle is not None:
                self.allocator.free(handle)
            self.trace.events.append(event)

    def _play(self, block: int, size: int) -> None:
        if block < 0:
            if block == STREAM_OPERATION:
                apply_operation(self.trace.stream_operations[size], self.allocator, self._blocks)
            else:
                self.allocator.empty_cache()
            self.trace.events.append((block, size))
            return
        wanted, optional = self._size(size)
        try:
            self._blocks[block] = self.allocator.malloc(wanted, self.trace.streams.get(block, MAIN_STREAM))
        except OutOfMemory as error:
            if not optional:
                self.ooms.append(str(error))
                for call in self.after_oom:
                    call()
                raise torch.OutOfMemoryError(str(error)) from None
        self.trace.events.append((block, size))
        for watch in self.watchers:
            watch(self.allocator.allocated_bytes, self.allocator.reserved_bytes)

    def _size(self, size: int) -> tuple[int, bool]:
        """Return the bytes of an allocation on this device; cuDNN can do without its workspace."""
        index = call_of(size)
        if index is None:
            return size, False
        call = self.trace.calls[index]
        is_convolution = isinstance(call, ConvolutionCall)
        if is_convolution and not self.unbounded:
            self.allocator.set_capacity(self.profile.capacity_bytes(True, self.trace.has_batch_norm))
        return self.profile.workspace_bytes(call), is_convolution
