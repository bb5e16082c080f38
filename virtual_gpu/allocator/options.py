"""Settings of the caching allocator, as PYTORCH_ALLOC_CONF (once PYTORCH_CUDA_ALLOC_CONF) spells them.

Keys and limits: c10/core/AllocatorConfig.h and .cpp, c10/cuda/CUDAAllocatorConfig.h.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from vramcast.errors import UserError, check_count, check_probability
from vramcast.virtual_gpu.allocator.sizes import (
    LARGE_SEGMENT_BYTES,
    MAX_NON_SPLIT_ROUNDING_BYTES,
    MIB,
    MIN_LARGE_BYTES,
    ROUNDUP_INTERVALS,
)

_PAIR = re.compile(r"([^\[\]:,]+):(\[[^\[\]]*\]|[^\[\]:,]+)(?:,|$)")

_WITHOUT_EFFECT = frozenset({
    "graph_capture_record_stream_reuse", "release_lock_on_cudamalloc", "release_lock_on_hipmalloc",
    "throw_on_cudamalloc_oom", "pinned_free_catch_all", "pinned_max_cached_size_mb", "pinned_max_round_threshold_mb",
    "pinned_num_register_threads", "pinned_reserve_segment_size_mb", "pinned_use_background_threads",
    "pinned_use_cuda_host_register", "pinned_use_hip_host_register",
})  # fmt: skip
"""Keys that affect host memory or how calls are made, but not the device memory."""


@dataclass(frozen=True, kw_only=True)
class AllocatorOptions:
    """Settings of the caching allocator. The defaults are those of PyTorch."""

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None
    """Larger blocks are never split; None for no limit."""
    roundup_power2_divisions: int | tuple[int, ...] = 0
    """Number of steps between two powers of two that sizes are rounded up to; 0 and 1 round to 512 bytes.

    A tuple has one number for each interval of sizes: below 2 MiB, below 4 MiB, ..., from 32 GiB.
    """
    large_segment_size_bytes: int = LARGE_SEGMENT_BYTES
    max_non_split_rounding_bytes: int = MAX_NON_SPLIT_ROUNDING_BYTES
    """Maximal excess of a block above `max_split_size_bytes` over the request that it serves."""
    garbage_collection_threshold: float = 0.0
    """Fraction of the allowed memory above which old cached blocks are returned. As in PyTorch, it has no effect
    without a `memory_fraction`."""
    memory_fraction: float = 1.0
    """Fraction of the device that the process may take (per_process_memory_fraction)."""

    def __post_init__(self) -> None:
        large = self.large_segment_size_bytes
        _check_mib("large_segment_size_bytes", large, MIN_LARGE_BYTES + MIB)
        if self.max_split_size_bytes is not None:
            _check_mib("max_split_size_bytes", self.max_split_size_bytes, large)
        if (
            self.max_non_split_rounding_bytes != MAX_NON_SPLIT_ROUNDING_BYTES
        ):  # the default is valid with any segment size
            _check_mib("max_non_split_rounding_bytes", self.max_non_split_rounding_bytes, large)
        check_probability("garbage_collection_threshold", self.garbage_collection_threshold)
        if not 0 <= self.memory_fraction <= 1:
            raise UserError(f"expected memory_fraction from 0 to 1, found {self.memory_fraction!r}: change it")
        self._check_divisions()

    def _check_divisions(self) -> None:
        setting = self.roundup_power2_divisions
        by_interval = setting if isinstance(setting, tuple) else (setting,)
        if isinstance(setting, tuple) and len(setting) != ROUNDUP_INTERVALS:
            raise UserError(
                f"expected roundup_power2_divisions to be one number or {ROUNDUP_INTERVALS}, found {len(setting)}: "
                "write it as in PYTORCH_ALLOC_CONF and use AllocatorOptions.parse"
            )
        for divisions in by_interval:
            check_count("roundup_power2_divisions", divisions, least=0)
            if divisions & (divisions - 1):
                raise UserError(f"expected roundup_power2_divisions of 0 or a power of 2, found {divisions}: change it")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a value of PYTORCH_ALLOC_CONF, such as 'expandable_segments:True,max_split_size_mb:128'."""
        values: dict[str, Any] = {}
        rest = "".join(text.split())
        while rest:
            pair = _PAIR.match(rest)
            if pair is None:
                raise UserError(f"expected allocator options as 'key:value,key:value', found {rest!r}: fix {text!r}")
            key, value = pair.groups()
            if key in _READERS:
                field, read = _READERS[key]
                values[field] = read(key, value)
            else:
                _check_passive(key, value)
            rest = rest[pair.end() :]
        return cls(**values)


def _check_mib(name: str, value: Any, least_bytes: int) -> None:
    """Raise unless a size is in whole MiB, as PyTorch reads it: above the split limit a block is a whole segment."""
    check_count(name, value, least_bytes)
    if value % MIB:
        raise UserError(f"expected {name} in whole MiB ({MIB} bytes), found {value}: round it")


def _check_passive(key: str, value: str) -> None:
    if key == "backend":
        if value != "native":
            raise UserError(f"expected the allocator's backend to be native, found {value!r}: only native is supported")
    elif key not in _WITHOUT_EFFECT:
        options = sorted({"backend", *_READERS, *_WITHOUT_EFFECT})
        raise UserError(f"expected an allocator option out of {options}, found {key!r}: remove or rename it")


def _whole(key: str, text: str) -> int:
    if not re.fullmatch("[0-9]{1,12}", text):
        raise UserError(f"expected {key} to be a whole number, found {text!r}: change it")
    return int(text)


def _mib(key: str, text: str) -> int:
    return _whole(key, text) * MIB


def _truth(key: str, text: str) -> bool:
    if text not in ("True", "False"):
        raise UserError(f"expected {key} to be True or False, found {text!r}: change it")
    return text == "True"


def _part(key: str, text: str) -> float:
    if not re.fullmatch(r"[0-9]*\.?[0-9]+(e-?[0-9]{1,3})?", text):
        raise UserError(f"expected {key} to be a number from 0 to 1, found {text!r}: change it")
    return float(text)


def _divisions(key: str, text: str) -> int | tuple[int, ...]:
    """Parse a number, or '[256:1,512:2,>:4]': MiB and divisions, in rising order (parseRoundUpPower2Divisions)."""
    if not text.startswith("["):
        return _whole(key, text)
    by_interval = [0] * ROUNDUP_INTERVALS
    last = None  # the interval of the boundary before this one
    for pair in filter(None, text[1:-1].split(",")):
        boundary, colon, divisions = pair.partition(":")
        value = _whole(key, divisions if colon else "")
        if boundary == ">":
            # PyTorch starts after the interval of the last boundary: '>' alone leaves the first interval at 0
            start = (last or 0) + 1
            by_interval[start:] = [value] * (ROUNDUP_INTERVALS - start)
            continue
        index = min(_boundary_interval(key, boundary), ROUNDUP_INTERVALS - 1)
        if last is None:  # the first boundary applies to all smaller sizes
            by_interval[:index] = [value] * index
        by_interval[index] = value
        last = index
    return tuple(by_interval)


def _boundary_interval(key: str, text: str) -> int:
    boundary_mib = _whole(key, text)
    if boundary_mib < 1 or boundary_mib & (boundary_mib - 1):
        raise UserError(f"expected the boundaries of {key} to be powers of 2 in MiB, found {text!r}: change it")
    return boundary_mib.bit_length() - 1


_READERS: Mapping[str, tuple[str, Callable[[str, str], Any]]] = {
    "expandable_segments": ("expandable_segments", _truth),
    "max_split_size_mb": ("max_split_size_bytes", _mib),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "large_segment_size_mb": ("large_segment_size_bytes", _mib),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _mib),
    "garbage_collection_threshold": ("garbage_collection_threshold", _part),
    "per_process_memory_fraction": ("memory_fraction", _part),
}
