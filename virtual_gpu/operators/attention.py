"""Attention on CUDA: the choice of a kernel for a call, and the memory that each kernel allocates.

The choice follows aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, without cuDNN's kernel: some releases prefer
it for compute capability 9.0 and 10.0, and it saves the same tensors as flash attention.
"""

from collections.abc import Sequence
from math import gcd
from typing import Any

import torch
from torch import Tensor

from vramcast.virtual_gpu.tracing.trace import AttentionCall, Kernel, Tracer, Use

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_MASK_ALIGNMENT = 16  # native/transformers/attention.cpp, preprocess_mask


def attention(
    compute_capability: float, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Run scaled_dot_product_attention as CUDA does (native/transformers/attention.cpp)."""
    wants_gradient = torch.is_grad_enabled() and any(item.requires_grad for item in (q, k, v))
    if _flash_takes(compute_capability, q, k, v, attn_mask, is_causal, wants_gradient):
        return _flash(q, k, v, dropout_p, is_causal, scale)
    if _efficient_takes(compute_capability, q, k, v):
        bias = _prepared_mask(attn_mask, q, k)
        operator = aten._scaled_dot_product_efficient_attention
        return operator(q, k, v, bias, wants_gradient, dropout_p, is_causal, scale=scale)[0]
    operator = aten._scaled_dot_product_attention_math
    return operator(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]


def _fit(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Check what both fused kernels require: four dimensions, at least one position, contiguous heads."""
    four = q.dim() == k.dim() == v.dim() == 4
    return four and q.shape[0] == k.shape[0] == v.shape[0] and 0 not in (q.shape[2], k.shape[2]) and all(
        item.stride(-1) == 1 or item.shape[-1] == 1 for item in (q, k, v)
    )  # fmt: skip


def _flash_takes(
    capability: float, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, wants_gradient: bool
) -> bool:
    """Check for half precision on Ampere or later, heads of up to 256, and no mask but a square causal one.

    The capability is compared last: a trace holds for all devices on which the comparisons end alike.
    """
    size = q.shape[-1]
    sizes = size == k.shape[-1] == v.shape[-1] and size <= 256
    # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120: their shared memory is too small
    small = size > 192 and wants_gradient and (8.6 <= capability < 9.0 or capability >= 12.0)
    causal = not is_causal or q.shape[-2] == k.shape[-2]
    fits = mask is None and sizes and causal and not small
    return q.dtype in _HALF and fits and _fit(q, k, v) and capability >= 8.0


def _efficient_takes(capability: float, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Check alignment for tensor cores, and no bfloat16 before Ampere (can_use_mem_efficient_attention).

    Heads must be equal in number, also with `enable_gqa` (sdp_utils_cpp.h, check_batch_size_and_num_heads_dense).
    """
    half = q.dtype in _HALF
    supported = q.dtype in (torch.float32, torch.float16) or (q.dtype == torch.bfloat16 and capability >= 8.0)
    common = gcd(q.shape[-1], v.shape[-1])
    sizes = q.shape[-1] == k.shape[-1] and (common % 8 == 0 or common % _alignment(capability, half) == 0)
    return supported and sizes and q.shape[-1] > 0 and q.shape[1] == k.shape[1] == v.shape[1] and _fit(q, k, v)


def _alignment(capability: float, half: bool) -> int:
    """Return the alignment in elements: 128 bits on tensor cores (sdp_utils.cpp, minimum_gemm_alignment)."""
    if half and capability >= 7.0:
        return 8
    return 4 if capability >= 8.0 else 1


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool, scale: float | None) -> Tensor:
    """Run flash attention; padding heads to a multiple of 8 copies queries, keys and values (pad_last_dim)."""
    size = q.shape[-1]
    if size % 8:
        scale = scale or size**-0.5
        q, k, v = (torch.constant_pad_nd(item, [0, 8 - size % 8]) for item in (q, k, v))
    out: Tensor = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
    return out[..., :size] if size % 8 else out


def _prepared_mask(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Turn a bool mask into a bias, pad its rows to 16 positions, expand it to batch and heads (attention.cpp)."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    length = mask.shape[-1]
    if any(step % _MASK_ALIGNMENT for step in mask.stride()[:-1]) or mask.stride(-1) != 1:
        mask = torch.constant_pad_nd(mask, [0, _MASK_ALIGNMENT - length % _MASK_ALIGNMENT])[..., :length]
    return mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def _new(tracer: Tracer, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return tracer.see(torch.empty(shape, dtype=dtype, device="meta"))


def _gradients(tracer: Tracer, *inputs: Tensor) -> list[Tensor]:
    """Allocate a gradient for each input, laid out as batch, position, head, element."""
    shapes = ((item.shape[0], item.shape[2], item.shape[1], item.shape[3]) for item in inputs)
    return [_new(tracer, shape, inputs[0].dtype).transpose(1, 2) for shape in shapes]


def _flash_backward(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Allocate row sums and queries' gradients in single precision (flash_attn/flash_api.cpp, mha_bwd)."""
    _, q, k, v = args[:4]
    if not q.is_meta:
        return NotImplemented
    batch, heads, length, size = q.shape
    rows, columns = _up(length, 128), _up(size, 32 if size <= 128 else 64)
    made = _gradients(tracer, q, k, v)
    softmax_d = _new(tracer, (batch, heads, rows), torch.float32)
    accumulated = _new(tracer, (batch, rows, heads, columns), torch.float32)
    if k.shape[1] != heads:  # heads that share keys get separate gradients first, which are then summed
        expanded = [_new(tracer, (batch, k.shape[2], heads, size), q.dtype) for _ in range(2)]
        del expanded
    del accumulated, softmax_d
    return tuple(made)


def _efficient_forward(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Allocate output and row sums; dropout's seed and offset stay on the host (cuda/attention.cu, without a graph)."""
    if not args[0].is_meta:
        return NotImplemented
    out, row_sums, *_ = aten._scaled_dot_product_efficient_attention.default(*args, **kwargs)
    seed, offset = (torch.empty((), dtype=torch.int64, device="cpu") for _ in range(2))
    return tracer.see(out), tracer.see(row_sums), seed, offset


def _efficient_backward(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Allocate gradients, row sums of grad * out, then the workspace (cuda/attention_backward.cu)."""
    _, q, k, v, bias = args[:5]
    if not q.is_meta:
        return NotImplemented
    made: list[Tensor | None] = [*_gradients(tracer, q, k, v), None]
    if bias is not None and args[10][3]:
        padded = _new(tracer, (*bias.shape[:-1], _up(bias.shape[-1], _MASK_ALIGNMENT)), bias.dtype)
        made[3] = padded[..., : bias.shape[-1]]
    delta = _row_sums(tracer, q, v.shape[-1])
    tracer.workspace(AttentionCall(tuple(q.shape), k.shape[2], v.shape[-1], q.dtype in _HALF), Use.TEMPORARIES)
    del delta
    return tuple(made)


def _row_sums(tracer: Tracer, q: Tensor, size: int) -> Tensor:
    """Allocate the row sums: half precision sums in the kernel (kKernelComputesDelta), single in three steps before."""
    batch, heads, length, _ = q.shape
    if q.dtype in _HALF:
        return _new(tracer, (batch, heads, length), torch.float32)
    product = _new(tracer, (batch, length, heads, size), torch.float32)
    total = _new(tracer, (batch, length, heads), torch.float32)
    delta = _new(tracer, (batch, heads, length), torch.float32)
    del total, product
    return delta


def efficient_workspace_bytes(call: AttentionCall, capability: float) -> int:
    """Return the bytes for gradients of queries, and of keys and values for large heads (kernel_backward.h)."""
    batch, heads, length, size = call.queries
    half, largest = call.is_half, max(size, call.value_size)
    block_i, block_j = _blocks(half, largest, capability)
    if capability < 7.0 and not half:
        return 0  # kNeedsAccumGradQ
    tiles = -(-length // block_i) * -(-size // block_j)
    elements = tiles * (block_i * block_j * 4 + 16) // 4  # GradQTempStorage: a tile, a lock and a counter
    if half and largest > block_i:  # kOutputInRF is false
        splits = _key_splits(batch * heads, -(-call.keys // block_j))
        elements += splits * block_j * (_up(size, block_i) + _up(call.value_size, block_i))
    return batch * heads * _up(elements, 4) * 4


def _blocks(half: bool, size: int, capability: float) -> tuple[int, int]:
    """Return the blocks of the first kernel that fits head and shared memory (mem_eff_attention/kernels/cutlassB.h)."""
    roomy = capability in (7.0, 8.0) or 9.0 <= capability < 12.0
    if size <= 64 or not roomy or (not half and capability < 8.0):
        return 64, 64
    return (128, 128) if half and size <= 128 and capability >= 8.0 else (128, 64)


def _key_splits(parallel: int, key_blocks: int) -> int:
    """Return the splits of keys: each needs its own gradients of keys and values (attention_backward.cu)."""
    splits = 1 if parallel >= 256 and key_blocks <= 2 else key_blocks
    return max(1, min(splits, 200 // parallel))


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


ATTENTION_KERNELS: dict[Any, Kernel] = {
    aten._scaled_dot_product_efficient_attention.default: _efficient_forward,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
}
"""The fused kernels that allocate other memory than torch's meta functions show."""
