"""Outputs of the most frequent operators, made without torch's meta functions.

Many of torch's meta functions are decompositions in Python that take milliseconds and allocate temporaries that no
CUDA kernel has. Each rule here allocates the outputs of the CUDA kernel. A rule that does not apply (a dtype that must
be promoted, a tensor that is not on meta) returns NotImplemented, and torch's function runs.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
Rule = Callable[..., Any]
SHAPES: dict[Any, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for name in names:
            packet, overload = name.split(".")
            operator = getattr(getattr(aten, packet, None), overload, None)
            if operator is not None:  # an older or newer torch may lack one
                SHAPES[operator] = function
        return function

    return register


def _empty(shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(shape, dtype=dtype or like.dtype, device="meta")


def empty_like(x: Tensor) -> Tensor:
    """Return torch.empty_like(x), whose meta function in Python takes several times as long."""
    if x.is_contiguous():
        return torch.empty(x.shape, dtype=x.dtype, device="meta")
    return torch.empty_strided(x.shape, _strides_like(x.shape, x.stride()), dtype=x.dtype, device="meta")


@lru_cache(maxsize=4096)
def _strides_like(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    return torch.empty_like(torch.empty_strided(shape, stride, device="meta")).stride()


def _flat(x: Tensor) -> bool:
    return x.is_meta and x.is_floating_point()


def _accumulating(x: Tensor) -> torch.dtype:
    """Return the dtype of statistics: single precision for half (ATen/AccumulateType.h, for CUDA)."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _like(x: Tensor | None, wanted: bool) -> Tensor | None:
    return empty_like(x) if wanted and x is not None else None


@_rule(
    "relu.default", "gelu.default", "silu.default", "mish.default", "softplus.default", "elu.default", "selu.default",
    "leaky_relu.default", "tanh.default", "sigmoid.default", "hardswish.default", "hardsigmoid.default", "exp.default",
    "hardtanh.default", "log.default", "sqrt.default", "rsqrt.default", "neg.default", "abs.default",
    "sin.default", "cos.default",
    "erf.default", "pow.Tensor_Scalar", "mul.Scalar", "add.Scalar", "sub.Scalar", "div.Scalar", "clamp.default",
    "clamp_min.default", "reciprocal.default",
    "zeros_like.default", "ones_like.default", "rand_like.default", "randn_like.default",
    "_prelu_kernel.default", "celu.default",
)  # fmt: skip
def _unary(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return an output with the input's layout; calls with another dtype, device or memory format are left to torch."""
    return empty_like(x) if _flat(x) and _keeps_layout(x, kwargs) else NotImplemented


def _keeps_layout(x: Tensor, kwargs: Mapping[str, Any]) -> bool:
    """Return whether keyword arguments name nothing but what a tensor has."""
    if not kwargs:
        return True
    own = {"dtype": x.dtype, "device": x.device, "layout": x.layout, "memory_format": torch.preserve_format}
    return all(not value or own.get(name) == value for name, value in kwargs.items())


@_rule("slice_backward.default")
def _slice_backward(grad: Tensor, sizes: Sequence[int], *args: Any) -> Any:
    return _empty(sizes, grad) if _flat(grad) else NotImplemented


@_rule("bernoulli.p")
def _bernoulli(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _empty(x.shape, x) if _flat(x) else NotImplemented  # Distributions.cpp: contiguous for any input


@_rule("log_sigmoid_forward.default")
def _log_sigmoid(x: Tensor) -> Any:
    return (empty_like(x), _empty((0,), x)) if _flat(x) else NotImplemented  # Activation.cpp: no buffer on CUDA


@_rule(
    "threshold_backward.default", "gelu_backward.default", "silu_backward.default",
    "softplus_backward.default", "leaky_relu_backward.default", "tanh_backward.default", "sigmoid_backward.default",
    "hardswish_backward.default", "hardsigmoid_backward.default", "hardtanh_backward.default",
)  # fmt: skip
def _gradient(grad: Tensor, other: Any, *args: Any, **kwargs: Any) -> Any:
    if not _flat(grad) or not isinstance(other, Tensor) or other.dtype != grad.dtype:
        return NotImplemented
    return _pointwise(grad, other) if other.shape == grad.shape else NotImplemented


@_rule("elu_backward.default")
def _elu_backward(grad: Tensor, alpha: Any, scale: Any, input_scale: Any, is_result: bool, x: Tensor) -> Any:
    return _gradient(grad, x)


@_rule("native_dropout_backward.default")
def _dropout_backward(grad: Tensor, mask: Tensor, scale: float) -> Any:
    """Return the memory format that the gradient suggests (cuda/Dropout.cu)."""
    if not _flat(grad) or grad.shape != mask.shape:
        return NotImplemented
    suggested = grad.dim() == 4 and grad.is_contiguous(memory_format=torch.channels_last)
    return empty_like(grad) if suggested else _empty(grad.shape, grad)


def _pointwise(a: Tensor, b: Tensor) -> Any:
    """Return an output of the common layout; for different layouts, the result depends on the operator."""
    return empty_like(a) if a.stride() == b.stride() else NotImplemented


@_rule("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor")
def _binary(a: Tensor, b: Any, **kwargs: Any) -> Any:
    if not _flat(a) or isinstance(b, complex) or (isinstance(b, Tensor) and b.is_complex()):
        return NotImplemented
    # a tensor's dtype takes precedence over a scalar's (aten/src/ATen/native/TypeProperties.cpp, result_type)
    if not isinstance(b, Tensor) or (b.dim() == 0 and a.dim() > 0):
        return empty_like(a)
    return _broadcast(a, b) if b.dtype == a.dtype and b.is_meta else NotImplemented


def _broadcast(a: Tensor, b: Tensor) -> Any:
    if b.shape == a.shape and b.stride() == a.stride():
        return empty_like(a)
    shape = broadcast_shape(a.shape, b.shape)
    if a.is_contiguous() and b.is_contiguous():
        return _empty(shape, a)
    out = empty_like(a)
    # the first operand's layout decides, if it has one (aten/src/ATen/TensorIterator.cpp, reorder_dimensions)
    return out if shape == a.shape and out.stride() == a.stride() and 1 not in shape else NotImplemented


@lru_cache(maxsize=4096)
def broadcast_shape(a: Sequence[int], b: Sequence[int]) -> torch.Size:
    """Return the shape to which two shapes broadcast."""
    return torch.broadcast_shapes(a, b)  # type: ignore[no-untyped-call, no-any-return]


@_rule("_prelu_kernel_backward.default")
def _prelu_backward(grad: Tensor, x: Tensor, weight: Tensor) -> Any:
    # Activation.cpp, _prelu_kernel_backward: the weight's gradient is as large as the input's; the caller sums it
    return (empty_like(x), empty_like(x)) if _flat(x) and grad.shape == x.shape else NotImplemented


@_rule("native_batch_norm.default")
def _batch_norm(x: Tensor, *args: Any) -> Any:
    """Allocate as cuDNN and the native kernel both do (cudnn/BatchNorm.cpp, cuda/Normalization.cu)."""
    return empty_like(x), *(_empty((x.shape[1],), x, _accumulating(x)) for _ in range(2))


@_rule("native_batch_norm_backward.default")
def _batch_norm_backward(grad: Tensor, x: Tensor, weight: Tensor | None, *args: Any) -> Any:
    """Allocate the input's gradient in any case: cudnn_batch_norm_backward has no mask."""
    mask = args[-1]
    return empty_like(x), _like(weight, mask[1]), _like(weight, mask[2])


@_rule("native_layer_norm.default")
def _layer_norm(x: Tensor, shape: Sequence[int], *args: Any) -> Any:
    rows = (*x.shape[: x.dim() - len(shape)], *[1] * len(shape))
    statistics = _accumulating(x)  # cuda/layer_norm_kernel.cu
    return _empty(x.shape, x), _empty(rows, x, statistics), _empty(rows, x, statistics)


@_rule("native_layer_norm_backward.default")
def _layer_norm_backward(
    grad: Tensor, x: Tensor, shape: Sequence[int], mean: Tensor, rstd: Tensor, weight: Tensor | None,
    bias: Tensor | None, mask: Sequence[bool],
) -> Any:  # fmt: skip
    made = _empty(x.shape, x) if mask[0] else None
    return made, _like(weight, mask[1]), _like(bias, mask[2])


@_rule("native_group_norm.default")
def _group_norm(x: Tensor, weight: Any, bias: Any, n: int, c: int, hw: int, groups: int, eps: float) -> Any:
    return _empty(x.shape, x), _empty((n, groups), x), _empty((n, groups), x)  # group_norm.cpp: contiguous on CUDA


@_rule("native_group_norm_backward.default")
def _group_norm_backward(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, *args: Any) -> Any:
    mask = args[-1]
    return _empty(x.shape, x) if mask[0] else None, _like(weight, mask[1]), _like(weight, mask[2])


@_rule("_softmax.default", "_log_softmax.default")
def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Any:
    return _empty(x.shape, x, torch.float32 if half_to_float else None) if x.is_meta else NotImplemented


@_rule("_softmax_backward_data.default", "_log_softmax_backward_data.default")
def _softmax_backward(grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Any:
    return _empty(output.shape, output, dtype)  # cuda/SoftMax.cu: contiguous


@_rule("nll_loss_forward.default", "nll_loss2d_forward.default")
def _nll_loss(x: Tensor, target: Tensor, weight: Any, reduction: int, ignore: int) -> Any:
    shape = x.shape[:1] + x.shape[2:] if reduction == 0 and x.dim() > 1 else ()
    return _empty(shape, x), _empty((), x)


@_rule("nll_loss_backward.default", "nll_loss2d_backward.default")
def _nll_loss_backward(grad: Tensor, x: Tensor, *args: Any) -> Any:
    return _empty(x.shape, x)


@_rule("mm.default", "bmm.default")
def _mm(a: Tensor, b: Tensor) -> Any:
    return _empty((*a.shape[:-1], b.shape[-1]), a) if multiply(a, b) else NotImplemented


@_rule("addmm.default", "baddbmm.default")
def _addmm(bias: Tensor, a: Tensor, b: Tensor, **kwargs: Any) -> Any:
    return _mm(a, b) if bias.dtype == a.dtype else NotImplemented


def multiply(a: Tensor, b: Tensor) -> bool:
    """Return whether two matrices, or batches of them, can be multiplied; torch reports errors for others."""
    fit = a.shape[-1] == b.shape[-2] and a.shape[:-2] == b.shape[:-2] and a.dtype == b.dtype
    return fit and a.is_meta and b.is_meta


@_rule("_grouped_mm.default")
def _grouped_mm(a: Tensor, b: Tensor, offsets: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    """Multiply the experts of a mixture; torch's meta function supports half precision alone."""
    if not a.is_meta or a.dtype != b.dtype or offsets is None:
        return NotImplemented
    if a.dim() == b.dim() == 2:  # the gradient of the experts' weights (native/cuda/GroupedBlas.cpp)
        return _empty((offsets.shape[0], a.shape[0], b.shape[1]), a)
    return _empty((a.shape[-2], b.shape[-1]), a)


@_rule("embedding.default")
def _embedding(weight: Tensor, indices: Tensor, *args: Any) -> Any:
    return _empty((*indices.shape, weight.shape[1]), weight)


@_rule("embedding_dense_backward.default")
def _embedding_backward(grad: Tensor, indices: Tensor, count: int, *args: Any) -> Any:
    return _empty((count, grad.shape[-1]), grad)


@_rule("cat.default")
def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    first = tensors[0]
    if not first.is_meta or any(item.dim() != first.dim() or item.dtype != first.dtype for item in tensors):
        return NotImplemented
    shape = list(first.shape)
    shape[dim] = sum(item.shape[dim] for item in tensors)
    if first.dim() == 4 and all(item.is_contiguous(memory_format=torch.channels_last) for item in tensors):
        return NotImplemented
    return _empty(shape, first)


@_rule("sum.dim_IntList", "mean.dim")
def _reduce(x: Tensor, dims: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    if not _flat(x) or not dims or not x.dim():
        return NotImplemented
    reduced = {d % x.dim() for d in dims}
    shape = [1 if i in reduced else n for i, n in enumerate(x.shape) if keepdim or i not in reduced]
    return _empty(shape, x, dtype)


def convolution_shape(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    """Return the output shape of a convolution that is not transposed."""
    sizes = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    return [x.shape[0], weight.shape[0], *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes)]
