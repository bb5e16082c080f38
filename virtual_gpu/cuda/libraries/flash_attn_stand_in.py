"""The stand-in for flash-attn 2: its functions, with the tensors that they allocate and save but without arithmetic.

The allocations are those of csrc/flash_attn/flash_api.cpp of flash-attn 2.6. Splits over keys, which a forward pass
with few rows uses, are left out.
"""

from typing import Any

import torch
from torch import Tensor, nn

VERSION = "2.6.3"


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attend to keys of shape batch, length, heads, size."""
    batch, length, heads, size = q.shape
    rows = (batch, _up(length, 128), heads, _columns(size))
    out, sums = _attention(q, k, v, (batch, heads, length), rows)
    return (out, sums, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Any:  # fmt: skip
    """Attend to sequences of several lengths, one after the other: total length, heads, size."""
    total, heads, size = q.shape
    rows = (total + 128 * (cu_seqlens_q.numel() - 1), heads, _columns(size))
    out, sums = _attention(q, k, v, (heads, total), rows)
    return (out, sums, None) if return_attn_probs else out


class _Attention(torch.autograd.Function):
    """Attention with the row sums of the softmax, and a backward pass in single precision."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        q, k, v, shape_of_sums, rows = args
        size = q.shape[-1]
        if size % 8:
            q, k, v = (nn.functional.pad(item, [0, 8 - size % 8]) for item in (q, k, v))
        out = torch.empty_like(q)
        sums = torch.empty(shape_of_sums, dtype=torch.float32, device=q.device)
        state = torch.empty(2, dtype=torch.int64, device=q.device)
        ctx.save_for_backward(q, k, v, out, sums, state)
        ctx.rows, ctx.size = rows, size
        ctx.mark_non_differentiable(sums)
        ctx.set_materialize_grads(False)
        return out[..., :size], sums

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        q, k, v, *_ = ctx.saved_tensors
        gradient = gradients[0]
        gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
        if ctx.size % 8:
            gradient = nn.functional.pad(gradient, [0, 8 - ctx.size % 8])
        made = [torch.empty_like(item) for item in (q, k, v)]
        workspace = [
            torch.empty(ctx.rows[:-1], dtype=torch.float32, device=q.device),
            torch.empty(ctx.rows, dtype=torch.float32, device=q.device),
        ]
        heads, shared = q.shape[-2], k.shape[-2]
        if heads != shared:  # heads that share keys get separate gradients first, which are then summed
            shape = (*k.shape[:-2], heads, k.shape[-1])
            separate = [torch.empty(shape, dtype=k.dtype, device=k.device) for _ in range(2)]
            for item, total in zip(separate, made[1:], strict=True):
                separate_heads = item.view(*k.shape[:-2], shared, heads // shared, k.shape[-1])
                torch.sum(separate_heads, dim=-2, out=total)
        del workspace
        return *(item[..., : ctx.size] for item in made), None, None


_attention: Any = _Attention.apply


def index_first_axis(values: Tensor, indices: Tensor) -> Tensor:
    """Gather rows."""
    rows: Tensor = values[indices]
    return rows


def unpad_input(values: Tensor, mask: Tensor, unused_mask: Tensor | None = None) -> Any:
    """Return the rows that a mask of shape batch, length selects, their places and the limits of each sequence."""
    lengths = mask.sum(dim=-1, dtype=torch.int32)
    places = torch.nonzero(mask.flatten(), as_tuple=False).flatten()
    limits = nn.functional.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    return index_first_axis(values.flatten(0, 1), places), places, limits, int(lengths.max().item()), lengths


def pad_input(values: Tensor, places: Tensor, batch: int, length: int) -> Tensor:
    """Scatter rows to shape batch, length."""
    out = torch.zeros(batch * length, *values.shape[1:], dtype=values.dtype, device=values.device)
    out[places] = values
    return out.view(batch, length, *values.shape[1:])


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _columns(size: int) -> int:
    return _up(_up(size, 8), 32 if size <= 128 else 64)
