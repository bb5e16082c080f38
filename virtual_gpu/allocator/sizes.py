"""Size rules of PyTorch's CUDA caching allocator: the block size of a request, and the segment that serves it.

Sources are those of PyTorch 2.11; constants without a file are in c10/core/AllocatorConfig.h, 16-24.
"""

MIB = 2**20

MIN_BLOCK_BYTES = 512  # kMinBlockSize: all sizes are rounded up to a multiple of this
SMALL_SIZE_BYTES = 1 * MIB  # kSmallSize: the largest request that the small pool serves
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer: segments of the small pool, and its pages in expandable segments
MIN_LARGE_BYTES = 10 * MIB  # kMinLargeAlloc: from here on a request gets a segment of its own size
ROUND_LARGE_BYTES = 2 * MIB  # kRoundLarge: such segments are rounded up to a multiple of this
LARGE_SEGMENT_BYTES = 20 * MIB  # large_segment_size_, AllocatorConfig.h 329; kLargeBuffer up to PyTorch 2.10
MAX_NON_SPLIT_ROUNDING_BYTES = 20 * MIB  # max_non_split_rounding_size_: kLargeBuffer unless it is set
ROUNDUP_INTERVALS = 16  # kRoundUpPowerOfTwoIntervals, c10/core/AllocatorConfig.cpp: powers of two, 1 MiB .. 64 GiB


def round_up(size_bytes: int, step_bytes: int) -> int:
    """Return the next multiple of a step."""
    return -(-size_bytes // step_bytes) * step_bytes


def round_to_division(size_bytes: int, divisions: int) -> int:
    """Round up to the next of the equal steps between two powers of two (CUDACachingAllocator.cpp, 2565-2583)."""
    floor_bytes = 1 << (size_bytes.bit_length() - 1)
    return round_up(size_bytes, floor_bytes // divisions)


def interval(size_bytes: int) -> int:
    """Return the interval of roundup_power2_divisions that a size belongs to (c10/core/AllocatorConfig.cpp)."""
    return min(max(size_bytes.bit_length() - MIB.bit_length(), 0), ROUNDUP_INTERVALS - 1)


def segment_bytes(size_bytes: int, large_segment_bytes: int) -> int:
    """Return the size of the segment that serves a rounded size (CUDACachingAllocator.cpp, 3115-3123)."""
    if size_bytes <= SMALL_SIZE_BYTES:
        return SMALL_SEGMENT_BYTES
    if size_bytes < MIN_LARGE_BYTES:
        return large_segment_bytes
    return round_up(size_bytes, ROUND_LARGE_BYTES)


def format_bytes(size_bytes: int) -> str:
    """Format a size as PyTorch's messages do (format_size in CUDACachingAllocator.cpp)."""
    if size_bytes <= 1024:
        return f"{size_bytes} bytes"
    for power, unit in ((1, "KiB"), (2, "MiB")):
        if size_bytes <= 1024 ** (power + 1):
            return f"{size_bytes / 1024**power:.2f} {unit}"
    return f"{size_bytes / 1024**3:.2f} GiB"
