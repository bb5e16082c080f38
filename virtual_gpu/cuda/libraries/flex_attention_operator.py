"""flex_attention: a higher-order operator, which torch cannot run under a dispatch mode (checked on torch 2.13).

Compiled, one kernel keeps the output and a number for each query. Uncompiled, torch computes all scores, and again in
the backward pass (torch/_higher_order_ops/flex_attention.py, math_attention and sdpa_dense_backward).
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vramcast.virtual_gpu.cuda.patches import Patches

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.emulation import CudaEmulation

_FUSED = "compiled flex_attention is simulated by the tensors of its kernel: inputs, output and log-sum-exp"
_DENSE = "flex_attention without torch.compile computes all scores; its backward pass is an upper estimate"


def _apply(module: ModuleType, patches: Patches, gpu: "CudaEmulation") -> None:
    """Replace the operator behind flex_attention, after torch has checked its arguments."""

    def operator(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Any,
        block_mask: Any,
        scale: float,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if gpu.in_compiled_code():
            gpu.assumptions.note(_FUSED)
            return _Fused.apply(query, key, value)  # type: ignore[no-untyped-call]
        gpu.assumptions.note(_DENSE)
        return _Dense.apply(query, key, value, score_mod, block_mask, scale)  # type: ignore[no-untyped-call]

    patches.set(module, "flex_attention_hop", operator)


class _Fused(torch.autograd.Function):
    """The kernel of Inductor (torch/_inductor/kernel/flex)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Allocate the output and the log-sum-exp of each query."""
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        sums = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, out, sums)
        return out, sums, torch.empty(0, device=query.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Allocate the row sums of the backward pass, and the gradients of the inputs."""
        query, key, value, _, sums = ctx.saved_tensors
        torch.empty_like(sums)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class _Dense(torch.autograd.Function):
    """torch's own implementation in eager code."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: Any, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute all scores, and keep what the operator keeps."""
        out, sums, largest = _attention(query, key, value, score_mod, block_mask, scale)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.rest = (score_mod, block_mask, scale)
        return out, sums, largest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Any, ...]:
        """Compute the scores again, with what their gradients need."""
        inputs = [item.detach().requires_grad_(True) for item in ctx.saved_tensors[:3]]
        with torch.enable_grad():
            out = _attention(*inputs, *ctx.rest)[0]
        return (*torch.autograd.grad(out, inputs, gradient), None, None, None)


def _attention(query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: Any, scale: float) -> Any:
    operators: Any = importlib.import_module("torch._higher_order_ops.flex_attention")
    return operators.math_attention(query, key, value, score_mod, block_mask, scale, {})


PATCHES = {"torch.nn.attention.flex_attention": _apply}
