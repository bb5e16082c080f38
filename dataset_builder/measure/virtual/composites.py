"""Composite operators take other paths on CUDA than on meta; while a trace runs, meta tensors take the CUDA path."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """CUDA has a fused dropout that keeps a mask of one byte an element (native/Dropout.cpp, is_fused_kernel_acceptable)."""
    if not train or p == 0 or x.numel() == 0:
        return x
    return torch.native_dropout(x, p, True)[0] if p < 1 else x * 0


def _attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    *, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Single precision takes the memory-efficient kernel (native/transformers/cuda/sdp_utils.cpp)."""
    needs_gradient = any(item.requires_grad for item in (q, k, v)) and torch.is_grad_enabled()
    operator = aten._scaled_dot_product_efficient_attention
    return operator(q, k, v, attn_mask, needs_gradient, dropout_p, is_causal, scale=scale)[0]


def _mish_backward(grad: Tensor, x: Tensor) -> Tensor:
    """One kernel on CUDA; the composite form has temporaries (native_functions.yaml)."""
    return torch.empty_like(x)


_RULES: dict[str, Callable[..., Any]] = {
    "dropout": _dropout,
    "scaled_dot_product_attention": _attention,
    "mish_backward": _mish_backward,
}


@contextmanager
def cuda_paths() -> Iterator[None]:
    """Composite operators on meta tensors run as they would on CUDA."""
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, rule in _RULES.items():
            library.impl(name, rule, "AutogradMeta")
        yield
    finally:
        library._destroy()
