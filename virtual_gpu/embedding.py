"""The backward pass of embeddings: many tokens are sorted, and their gradients are summed in segments.

aten/src/ATen/native/cuda/Embedding.cu, embedding_dense_backward_cuda, then EmbeddingBackwardKernel.cu,
embedding_backward_cuda_kernel, in the order of their allocations.
"""

from typing import Any

import torch
from torch import Tensor

from vramcast.virtual_gpu.trace import Tracer

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

    held = [new(tokens), new(tokens)]  # sorted and original indices
    scratch = [new(tokens), new(2 * tokens + _FEW)]  # a range, and cub's doubles of keys and values
    scratch.clear()
    out = new(count, size, dtype=grad.dtype)
    held += [new(tokens), new(1)]  # where segments start, and how many there are
    new(_FEW)
    segments = min(tokens, count)
    held += [new(segments), new(segments)]  # parts of each segment, and their sum so far
    new(_FEW)
    parts = tokens // _ROWS_PER_THREAD + segments
    held += [new(1), new(parts), new(parts, -(-size // _WARP) * _WARP, dtype=torch.float32)]
    held.clear()
    return out
