"""CUDA kernels that allocate more memory, or in another order, than torch's meta functions show."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from vramcast.virtual_gpu.operators.attention import ATTENTION_KERNELS
from vramcast.virtual_gpu.operators.contiguity import contiguous, copying_kernels
from vramcast.virtual_gpu.operators.convolutions import convolution_kernels
from vramcast.virtual_gpu.operators.embedding import embedding_backward, index_put
from vramcast.virtual_gpu.operators.recurrent import recurrent_kernels
from vramcast.virtual_gpu.operators.reductions import reduction_kernels
from vramcast.virtual_gpu.operators.resized import resizing_kernels
from vramcast.virtual_gpu.operators.selections import selection_kernels
from vramcast.virtual_gpu.operators.shapes import SHAPES, empty_like, multiply
from vramcast.virtual_gpu.tracing.trace import Kernel, LibraryCall, Tracer, Use, in_backward

aten = torch.ops.aten

_ONE_OWNER, _ONE_STORAGE = 4, 2  # tests/test_virtual_rules.py compares the rule with torch without a mode

_INTO = (aten.mm.out, aten.addmm.out, aten.bmm.out, aten.baddbmm.out)
_FUSED = ("adagrad_", "adam_", "adamw_", "sgd_")
_LISTS = ("aten::_foreach_", "aten::_amp_foreach_", *(f"aten::_fused_{name}" for name in _FUSED))
_REDUCTIONS = ("aten::_foreach_norm", "aten::_foreach_max", "aten::_foreach_powsum")


def _matmul(operator: Any) -> Kernel:
    shape = SHAPES[operator]

    def product(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hold a cuBLAS workspace for each handle and stream; forward and backward run in separate threads.

        The output is allocated before the handle is requested, then copies of matrices that cuBLAS cannot read
        (cuda/Blas.cpp).
        """
        out = shape(*args, **kwargs)
        if out is not NotImplemented:
            tracer.see(out)
        if args[0].is_meta:
            tracer.hold("cublas")
            _copy_matrices(tracer, args[-2:])
        return out

    return product


def _copy_matrices(tracer: Tracer, matrices: Sequence[Tensor]) -> None:
    """Copy matrices that cuBLAS cannot read for the duration of a product (prepare_matrix_for_cublas)."""
    copies = [contiguous(tracer, item) for item in matrices if not _is_matrix(item)]
    copies.clear()


def _is_matrix(x: Tensor) -> bool:
    """Return whether cuBLAS can read a matrix, or a batch of them, as it lies in memory; it reads no sparse ones."""
    if x.layout is not torch.strided:
        return True
    (rows, columns), (down, across) = x.shape[-2:], x.stride()[-2:]
    return x.is_contiguous() or (across == 1 and down >= max(columns, 1)) or (down == 1 and across >= max(rows, 1))


def _linear(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run addmm: with a bias vector it uses cublasLt, which has a workspace during the call (cuda/Blas.cpp)."""
    bias, a, b = args[:3]
    if not multiply(a, b) or bias.dtype != a.dtype:
        return NotImplemented
    out = tracer.see(torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device="meta"))
    tracer.hold("cublas")
    if bias.dim() == 1:
        tracer.workspace(LibraryCall("cublaslt"))
    _copy_matrices(tracer, (a, b))
    return out


def _product_into(operator: Any) -> Kernel:
    """Return the rule of a product whose output is given, as compiled code calls it."""

    def product(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = kwargs.get("out")
        if out is None or not out.is_meta:
            return NotImplemented
        tracer.hold("cublas")
        if operator is aten.addmm.out and args[0].dim() == 1:
            tracer.workspace(LibraryCall("cublaslt"))
        _copy_matrices(tracer, args[-2:])
        return out

    return product


def _batch_norm(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Note batch norm over images: cuDNN loads its kernels at first use (native/Normalization.cpp, use_cudnn)."""
    x = args[0]
    if x.is_meta and x.dim() > 2:
        tracer.trace.has_batch_norm = True
    return NotImplemented


def _dropout(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Allocate the mask before the output; the order decides the placement (native/cuda/Dropout.cu, dropout_cuda)."""
    x = args[0]
    if not x.is_meta:
        return NotImplemented
    mask = tracer.see(torch.empty_like(x, dtype=torch.bool))
    return tracer.see(empty_like(x)), mask


def _softmax_backward(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Allocate the gradient, the product of the incoming one and the output, and copies (native/cuda/SoftMax.cu)."""
    grad, output = args[:2]
    if not grad.is_meta:
        return NotImplemented
    made = tracer.see(SHAPES[aten._softmax_backward_data.default](*args, **kwargs))
    product = tracer.see(grad * output)
    copies = [contiguous(tracer, item) for item in (product, output)]
    copies.clear()
    del product
    return made


def _foreach(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Allocate a new tensor for each of a list (native/cuda/Foreach*.cu)."""
    items = _first_list(args)
    return [tracer.see(empty_like(item)) for item in items] if items else NotImplemented


def _in_place_lists(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return None if _first_list(args) else NotImplemented


def _first_list(args: tuple[Any, ...]) -> list[Tensor]:
    """Return the first list of tensors among the arguments, if they are on meta; a scalar may precede it."""
    lists = (item for item in args if isinstance(item, (list, tuple)) and item and isinstance(item[0], Tensor))
    tensors = list(next(lists, ()))
    return tensors if tensors and tensors[0].is_meta else []


def _accumulate(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add a later gradient to the first in place, as autograd does if nothing else references the first.

    torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace; under a dispatch mode autograd would not, so this rule
    does. The reference counts are those of a tensor with a single owner, as seen inside the mode. Autograd never does
    so where gradients are recorded, as in a forward pass that checkpointing repeats.
    """
    a, b = args[:2]
    if not in_backward() or torch.is_grad_enabled():
        return NotImplemented
    if not isinstance(b, Tensor) or a.shape != b.shape or not a.is_meta or a.dtype != b.dtype:
        return NotImplemented
    alone = a._use_count() == _ONE_OWNER and torch._C._storage_Use_Count(a.untyped_storage()._cdata) == _ONE_STORAGE
    return a if alone and a.numel() and empty_like(a).stride() == a.stride() else NotImplemented


def _read_number(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a number to Adafactor and ASGD, which read values of their state that decide no shape."""
    return 1.0 if args[0].is_meta and tracer.phase is Use.OPTIMIZER_STATE else NotImplemented


def _list_operators() -> Iterator[Any]:
    """Yield all operators over lists of tensors, including those of optimizers."""
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith(_LISTS) and not name.startswith(_REDUCTIONS):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            yield getattr(getattr(aten, packet), overload or "default")


def cuda_kernels() -> dict[Any, Kernel]:
    """Return all kernels by operator."""
    kernels: dict[Any, Kernel] = {
        **convolution_kernels(),
        **copying_kernels(),
        aten.addmm.default: _linear,
        aten.native_batch_norm.default: _batch_norm,
        aten.native_dropout.default: _dropout,
        aten._softmax_backward_data.default: _softmax_backward,
        **ATTENTION_KERNELS,
        **recurrent_kernels(),
        aten.embedding_dense_backward.default: embedding_backward,
        aten.index_put.default: index_put,
        aten._local_scalar_dense.default: _read_number,
        aten.add.Tensor: _accumulate,
        **{operator: _product_into(operator) for operator in _INTO},
        **{operator: _matmul(operator) for operator in (aten.mm.default, aten.bmm.default, aten.baddbmm.default)},
        **reduction_kernels(),
        **resizing_kernels(),
        **selection_kernels(),
    }
    for operator in _list_operators():
        in_place = operator._schema.name.endswith("_")
        kernels[operator] = _in_place_lists if in_place else _foreach
    return kernels
