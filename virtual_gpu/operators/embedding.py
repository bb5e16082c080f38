"""The backward pass of embeddings and of indexing: indices are sorted, and gradients of equal ones are added.

aten/src/ATen/native/cuda/Embedding.cu, embedding_dense_backward_cuda, then EmbeddingBackwardKernel.cu,
embedding_backward_cuda_kernel; Indexing.cu, index_put_with_sort_kernel; in the order of their allocations.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vramcast.virtual_gpu.operators.contiguity import contiguous
from vramcast.virtual_gpu.tracing.trace import SegmentsCall, Tracer, in_backward

MASKS = (torch.bool, torch.uint8)
"""Dtypes of indices that are masks."""
_SORT_FROM = 3072
_ROWS_PER_THREAD = 10  # NROWS_PER_THREAD
_WARP = 32
_FEW = 512
"""Scratch of cub's scans, in indices: a few KiB."""


def embedding_backward(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Allocate the weight's gradient, as large as the weight, and temporaries that grow with the tokens."""
    grad, indices, count = args[:3]
    if not grad.is_meta:
        return NotImplemented
    tokens, size = indices.numel(), grad.shape[-1]
    if tokens <= _SORT_FROM:
        return tracer.see(torch.empty((count, size), dtype=grad.dtype, device="meta"))

    def new(*shape: int, dtype: torch.dtype = indices.dtype) -> Tensor:
        return tracer.see(torch.empty(shape, dtype=dtype, device="meta"))

    held: list[object] = [new(tokens), new(tokens)]  # sorted and original indices
    scratch = [new(tokens), new(2 * tokens + _FEW)]  # a range, and cub's doubles of keys and values
    scratch.clear()
    out = new(count, size, dtype=grad.dtype)
    held += [new(tokens), new(1)]  # where segments start, and how many there are
    new(_FEW)
    segments = min(tokens, count)
    held += [new(segments), new(segments)]  # parts of each segment, and their sum so far
    new(_FEW)
    width = -(-size // _WARP) * _WARP
    if tracer.postpones_sums:
        calls = (SegmentsCall(tokens, segments, bytes_each) for bytes_each in (indices.element_size(), 4 * width))
        held += [new(1), *map(tracer.held_call, calls)]
    else:
        parts = tokens // _ROWS_PER_THREAD + segments
        held += [new(1), new(parts), new(parts, width, dtype=torch.float32)]
    held.clear()
    return out


def segments_bytes(call: SegmentsCall) -> int:
    """Return the size of a buffer for the parts of all segments."""
    return (call.tokens // _ROWS_PER_THREAD + call.segments) * call.bytes_a_part


def index_put(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Allocate what adding up values at equal indices takes; other calls are left to torch."""
    x, indices = args[:2]
    if not x.is_meta or any(item is not None and item.dtype in MASKS for item in indices):
        return NotImplemented
    return put(tracer, args, kwargs) if _accumulates(args, kwargs) else NotImplemented


def put(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any], *, in_place: bool = False) -> Tensor:
    """Allocate the result of a call with places as indices, and what sorts these if equal ones are added up.

    The gradient of indexing adds to zeros in place (FunctionsManual.cpp, index_backward); autograd calls the operator
    that allocates a result only because a dispatch mode is active.
    """
    x, indices, values = args[:3]
    accumulates = _accumulates(args, kwargs)
    in_place = in_place or (accumulates and in_backward())
    out: Tensor = x if in_place else tracer.see(torch.empty_like(x))
    if accumulates:
        _sort(tracer, indices, values)
    return out


def _accumulates(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(args[3] if len(args) > 3 else kwargs.get("accumulate", False))


def _sort(tracer: Tracer, indices: Sequence[Tensor | None], values: Tensor) -> None:
    """Record what a sum over equal indices allocates for its duration."""
    count = torch.broadcast_tensors(*(item for item in indices if item is not None))[0].numel()  # type: ignore[no-untyped-call]

    def new(size: int) -> Tensor:
        return tracer.see(torch.empty(size, dtype=torch.int64, device="meta"))

    held = [new(count), contiguous(tracer, values), new(count), new(count)]  # linear, sorted and original indices
    held += [new(count), new(2 * count + _FEW)]  # a range, and cub's doubles of keys and values
    held.clear()
