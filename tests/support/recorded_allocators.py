"""Recordings whose truth is known: random use of an allocator that records itself."""

import random

from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions, Block
from vramcast.virtual_gpu.recordings import recorder

TOTAL_BYTES = 80 << 30


class RecordedAllocator(recorder.RecordedAllocator):
    """An allocator on a device of 80 GiB, of which a part may be free."""

    def __init__(self, options: AllocatorOptions | None = None, capacity_bytes: int | None = None) -> None:
        super().__init__(capacity_bytes, options, TOTAL_BYTES)

    def synchronize(self) -> None:
        """Complete the frees of blocks that other streams used."""
        self.allocator.synchronize()
        self.note_device([])


def random_history(recorded: RecordedAllocator, seed: int, operations: int, most_bytes: int = 40 << 20) -> None:
    """Allocate, free, use other streams and return the cache at random."""
    draw = random.Random(seed)
    live: list[Block] = []
    for _ in range(operations):
        choice = draw.random()
        if choice < 0.55 or not live:
            size = draw.choice([draw.randint(1, 4096), draw.randint(1, 1 << 20), draw.randint(1, most_bytes)])
            block = recorded.malloc(size, draw.choice([0, 0, 0, 7]))
            if block is not None:
                live.append(block)
        elif choice < 0.96:
            block = live.pop(draw.randrange(len(live)))
            if draw.random() < 0.1:
                recorded.allocator.record_stream(block, 9)
            recorded.free(block)
        elif choice < 0.985:
            recorded.synchronize()
        else:
            recorded.empty_cache()
