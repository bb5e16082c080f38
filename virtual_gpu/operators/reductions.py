"""Sums over a tensor's rows, such as a bias's gradient: torch splits them among blocks that combine in a buffer.

aten/src/ATen/native/cuda/Reduce.cuh, setReduceConfig and ReduceConfig::global_memory_size. The buffer is large if the
inputs of one sum are far apart: each thread then has its own slots in it. The semaphores (a few bytes per block) are
left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from vramcast.virtual_gpu.operators.shapes import SHAPES
from vramcast.virtual_gpu.tracing.trace import Kernel, ReductionCall, SumCall, Tracer

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)
_MOST_THREADS = 512  # MAX_NUM_THREADS
_WARP = 32
_MOST_VECTOR = 4  # get_output_vec_size
_LEAST_VALUES, _MOST_VALUES = 16, 256  # of a thread: min_values_per_thread, max_values_per_thread

# CUDA C++ Programming Guide, technical specifications per compute capability: resident threads of a multiprocessor
_RESIDENT_THREADS = {7.5: 1024, 8.6: 1536, 8.7: 1536, 8.9: 1536, 12.0: 1536, 12.1: 1536}
_USUAL_RESIDENT_THREADS = 2048


@dataclass(frozen=True)
class _Dimension:
    stride: int
    size: int


def split_bytes(call: ReductionCall, multiprocessors: int, capability: float) -> int:
    """Return the size of the buffer that combines blocks; 0 if the device is busy enough without a split."""
    resident = _RESIDENT_THREADS.get(capability, _USUAL_RESIDENT_THREADS)
    wanted = multiprocessors * (resident // call.threads)
    if call.values < _MOST_VALUES or call.blocks > wanted:
        return 0
    enough = min(-(-wanted // call.blocks), -(-call.values // _LEAST_VALUES))
    splits = max(enough, -(-call.values // _MOST_VALUES))
    return splits * call.bytes_a_split if splits > 1 else 0


def reduction_call(x: Tensor, dims: Sequence[int]) -> ReductionCall | None:
    """Return torch's layout of a sum over these dimensions, or None if torch does not consider a split."""
    return call_of_sum(_sum_call(x, dims))


def _sum_call(x: Tensor, dims: Sequence[int]) -> SumCall:
    reduced = tuple(sorted({dim % x.dim() for dim in dims})) if x.dim() else ()
    return SumCall(tuple(x.shape), tuple(x.stride()), reduced, x.element_size())


def call_of_sum(call: SumCall) -> ReductionCall | None:
    """Return torch's layout of a sum, or None if torch does not consider a split."""
    rank = len(call.shape)
    inside = _merged([_Dimension(call.strides[dim], call.shape[dim]) for dim in call.dims])
    across = _merged([_Dimension(call.strides[dim], call.shape[dim]) for dim in range(rank) if dim not in call.dims])
    if not inside or not across or prod(call.shape) == 0:
        return None
    inputs, outputs = prod(item.size for item in inside), prod(item.size for item in across)
    side_by_side = inside[0].stride < across[0].stride
    vector = 1 if side_by_side else _vector(inside, across)
    width, height = _block(*((inputs, outputs) if side_by_side else (outputs // vector, inputs)), vector)
    values = -(-inputs // width) if side_by_side else inputs
    if values < min(height * _LEAST_VALUES, _MOST_VALUES):
        return None  # each row of a block has its own output
    step = 1 if side_by_side else width
    accumulated = 8 if call.element_bytes == 8 else 4
    return ReductionCall(
        blocks=-(-(outputs // vector) // step),
        threads=width * height,
        values=-(-inputs // (height * (width if side_by_side else 1))),
        bytes_a_split=accumulated * outputs * (1 if side_by_side else width * vector),
    )


def _merged(dimensions: list[_Dimension]) -> list[_Dimension]:
    """Sort dimensions by stride and merge adjacent ones (TensorIterator.cpp, coalesce_dimensions)."""
    merged: list[_Dimension] = []
    for item in sorted((item for item in dimensions if item.size > 1), key=lambda item: item.stride):
        if merged and item.stride == merged[-1].stride * merged[-1].size:
            merged[-1] = _Dimension(merged[-1].stride, merged[-1].size * item.size)
        else:
            merged.append(item)
    return merged


def _vector(inside: list[_Dimension], across: list[_Dimension]) -> int:
    """Return how many outputs a thread loads at once: four, two or one, as sizes and strides allow."""
    if across[0].stride != 1:
        return 1
    numbers = (across[0].size, *(item.stride for item in (*inside, *across[1:])))
    return next(size for size in (_MOST_VECTOR, 2, 1) if all(number % size == 0 for number in numbers))


def _block(wide: int, high: int, vector: int) -> tuple[int, int]:
    """Return width and height of a block in threads (set_block_dimension)."""
    most = _MOST_THREADS // vector
    widest, highest = (most if size >= most else 1 << (size.bit_length() - 1) for size in (wide, high))
    height = min(highest, most // min(widest, _WARP))
    return min(widest, most // height), height


def record_sum_buffer(tracer: Tracer, x: Tensor, dims: Sequence[int]) -> None:
    """Record the buffer of a sum over these dimensions, for the duration of its kernel (gpu_reduce_kernel)."""
    if tracer.postpones_sums:
        tracer.workspace(_sum_call(x, dims))
        return
    call = reduction_call(x, dims)
    if call is not None and call.values >= _MOST_VALUES:
        tracer.workspace(call)


def _reduction(operator: Any) -> Kernel:
    shape = SHAPES.get(operator)

    def reduce(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Allocate the output, then the buffer; an input of another dtype is converted first, but for half precision.

        native/ReduceOpsUtils.h, make_reduction_from_out_ty. The sum of a mask is one of 64-bit integers.
        """
        x = args[0]
        dims = args[1] if len(args) > 1 and args[1] else range(x.dim())
        if not x.is_meta:
            return NotImplemented
        out = shape(*args, **kwargs) if shape else NotImplemented
        out = tracer.see(operator(*args, **kwargs) if out is NotImplemented else out)
        converts = out.dtype != x.dtype and not (x.dtype in _HALF and out.dtype == torch.float32)
        summed = tracer.see(torch.empty(x.shape, dtype=out.dtype, device="meta")) if converts else x
        record_sum_buffer(tracer, summed, dims)
        return out

    return reduce


def reduction_kernels() -> dict[Any, Kernel]:
    """Return the kernels of sums and means."""
    return {operator: _reduction(operator) for operator in (aten.sum.default, aten.sum.dim_IntList, aten.mean.dim)}
