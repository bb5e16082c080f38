"""Lets composite operators take their CUDA path on meta tensors during a trace."""

import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from vramcast.virtual_gpu.compiled.tracing import traces_graph
from vramcast.virtual_gpu.operators.attention import attention
from vramcast.virtual_gpu.operators.autocast import autocast_rules, replaced
from vramcast.virtual_gpu.operators.recurrent import recurrent_paths

aten = torch.ops.aten


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Run CUDA's fused dropout, which saves a mask of one byte per element (native/Dropout.cpp)."""
    if not train or p == 0 or x.numel() == 0:
        return x
    return torch.native_dropout(x, p, True)[0] if p < 1 else x * 0


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Add the bias of a non-contiguous input in place; under a mode, torch would not (native/Linear.cpp)."""
    if bias is None or x.dim() <= 2 or x.is_contiguous():
        return aten.linear.default.decompose(x, weight, bias)
    return torch.matmul(x, weight.t()).add_(bias)


def _softmax(kernel: Any, composite: Any, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """Convert float16 to single precision within the kernel; other inputs are copied first (native/SoftMax.cpp)."""
    if x.dtype == torch.float16 and dtype == torch.float32:
        return kernel(x, dim, True)
    return composite.decompose(x, dim, dtype)


def _mish_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Allocate the output alone: one kernel on CUDA, without the composite's temporaries (native_functions.yaml)."""
    if traces_graph():  # the node of the output must depend on the inputs
        return aten.mish_backward.default.decompose(grad, x)  # type: ignore[no-any-return]
    return torch.empty_like(x)


class _FusedRmsNorm(torch.autograd.Function):
    """CUDA's RMS norm, which saves its input and a scale for each row (cuda/layer_norm_kernel.cu)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Sequence[int], weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """Allocate the output and the scales."""
        made = torch.empty_like(x.contiguous())
        rows = (*x.shape[: x.dim() - len(shape)], *[1] * len(shape))
        scales = torch.empty(rows, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        ctx.save_for_backward(x, weight, scales)
        ctx.mark_non_differentiable(scales)
        ctx.set_materialize_grads(False)  # of the scales
        return made, scales

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Allocate the gradients; a copy of a strided gradient of the output, as of a sum, lives until then."""
        _, weight, _ = ctx.saved_tensors
        dense = grads[0].contiguous()
        of_input = torch.empty_like(dense) if ctx.needs_input_grad[0] else None
        return of_input, None, torch.empty_like(weight) if ctx.needs_input_grad[2] else None


class _RecordedRmsNorm(torch.autograd.Function):
    """The same as nodes of a graph: torch's operators, which the compiler decomposes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> Any:
        """Record the operator."""
        with torch._C._AutoDispatchBelowAutograd():
            out, scales = aten._fused_rms_norm.default(x, shape, weight, eps)
        ctx.save_for_backward(x, weight, scales)
        ctx.shape = shape
        ctx.mark_non_differentiable(scales)
        ctx.set_materialize_grads(False)
        return out, scales

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Record its gradient (derivatives.yaml)."""
        x, weight, scales = ctx.saved_tensors
        mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        of_input, of_weight = aten._fused_rms_norm_backward.default(grads[0], x, ctx.shape, scales, weight, mask)
        return of_input, None, of_weight, None


def _fused_rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> Any:
    if traces_graph():
        return _RecordedRmsNorm.apply(x, shape, weight, eps)  # type: ignore[no-untyped-call]
    return _FusedRmsNorm.apply(x, shape, weight)  # type: ignore[no-untyped-call]


def _rules(compute_capability: float) -> dict[str, Callable[..., Any]]:
    return {
        "dropout": _dropout,
        "linear": _linear,
        "softmax.int": partial(_softmax, aten._softmax.default, aten.softmax.int),
        "log_softmax.int": partial(_softmax, aten._log_softmax.default, aten.log_softmax.int),
        "scaled_dot_product_attention": partial(attention, compute_capability),
        "mish_backward": _mish_backward,
        "_fused_rms_norm": _fused_rms_norm,
        **recurrent_paths(),
    }


@contextmanager
def cuda_paths(compute_capability: float = 8.0) -> Iterator[None]:
    """Let composite operators on meta tensors run as on CUDA; contexts may be nested, the innermost applies."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            for name, rule in _rules(compute_capability).items():
                library.impl(name, rule, "AutogradMeta")  # type: ignore[no-untyped-call]
        with autocast_rules(), _optimizers_on_meta():
            yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


@contextmanager
def _optimizers_on_meta() -> Iterator[None]:
    """Let fused and capturable optimizers take meta tensors as they take CUDA's (torch/optim/optimizer.py)."""
    base = importlib.import_module("torch.optim.optimizer")
    users = [getattr(torch.optim, name) for name in dir(torch.optim)]  # each module imports the functions by name
    modules = {base, *(importlib.import_module(item.__module__) for item in users if isinstance(item, type))}
    with ExitStack() as stack:
        for name in ("_get_fused_kernels_supported_devices", "_get_capturable_supported_devices"):
            original = getattr(base, name)
            for module in modules:
                if hasattr(module, name):
                    stack.enter_context(replaced(module, name, _with_meta(original)))
        yield


def _with_meta(original: Callable[..., list[str]]) -> Callable[..., list[str]]:
    @wraps(original)
    def devices(*args: Any, **kwargs: Any) -> list[str]:
        return [*original(*args, **kwargs), "meta"]

    return devices
