"""Our fast output rules, held to torch's own meta functions over a grid of inputs."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from vramcast.virtual_gpu.operators.shapes import SHAPES

aten = torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Case = tuple[tuple[Any, ...], dict[str, Any]]

# where CUDA differs from torch's meta function, and why
DELIBERATE = {
    aten.native_layer_norm.default: "CUDA keeps mean and rstd of half precision in single (layer_norm_kernel.cu)",
    aten.native_batch_norm.default: "CUDA keeps statistics of half precision in single (Normalization.cu)",
    aten.log_sigmoid_forward.default: "CUDA has no buffer (Activation.cpp), meta makes the CPU's",
}

LAYOUT_DIFFERS = {
    aten._softmax_backward_data.default: "contiguous on CUDA (SoftMax.cu), a decomposition on meta",
    aten._log_softmax_backward_data.default: "contiguous on CUDA (SoftMax.cu), a decomposition on meta",
    aten.native_dropout_backward.default: "the gradient's format on CUDA (Dropout.cu), a decomposition on meta",
    aten.native_group_norm.default: "contiguous on CUDA (group_norm.cpp), the input's format on meta",
    aten.native_group_norm_backward.default: "contiguous on CUDA (group_norm.cpp), the input's format on meta",
    aten.native_batch_norm_backward.default: "the input's layout on CUDA (cudnn/BatchNorm.cpp), contiguous on meta",
}


def tensor(*shape: int, dtype: torch.dtype = torch.float32, layout: str = "contiguous") -> Tensor:
    """A meta tensor of that shape in one of the layouts that training meets."""
    if layout == "channels_last" and len(shape) == 4:
        return torch.empty(shape, dtype=dtype, device="meta", memory_format=torch.channels_last)
    if layout == "transposed" and len(shape) > 1:
        return torch.empty((*shape[:-2], shape[-1], shape[-2]), dtype=dtype, device="meta").mT
    if layout == "expanded" and shape:
        return torch.empty((*shape[:-1], 1), dtype=dtype, device="meta").expand(shape)
    if layout == "gaps" and shape:
        return torch.empty((*shape[:-1], shape[-1] * 2), dtype=dtype, device="meta")[..., ::2]
    return torch.empty(shape, dtype=dtype, device="meta")


LAYOUTS = ("contiguous", "channels_last", "transposed", "expanded", "gaps")
SHAPES_OF_INPUTS = ((), (5,), (4, 6), (2, 3, 4), (2, 3, 4, 5), (2, 1, 4, 1))


def inputs(dtypes: tuple[torch.dtype, ...] = DTYPES) -> Iterator[Tensor]:
    for shape, dtype, layout in itertools.product(SHAPES_OF_INPUTS, dtypes, LAYOUTS):
        yield tensor(*shape, dtype=dtype, layout=layout)


def unary_cases(operator: Any) -> Iterator[Case]:
    extra: dict[str, tuple[Any, ...]] = {
        "pow.Tensor_Scalar": (2.0,), "mul.Scalar": (2,), "add.Scalar": (0.5,), "sub.Scalar": (1,), "div.Scalar": (3,),
        "clamp.default": (0.0, 1.0), "clamp_min.default": (0.0,), "bernoulli.p": (0.5,),
    }  # fmt: skip
    args = extra.get(name_of(operator), ())
    for x in inputs():
        yield (((x, torch.empty_like(x)) if "_prelu" in name_of(operator) else (x, *args)), {})
    integers = torch.empty(3, 4, dtype=torch.int64, device="meta")
    if name_of(operator) in ("neg.default", "mul.Scalar", "exp.default", "zeros_like.default"):
        yield ((integers, *args), {})
    if name_of(operator).endswith("_like.default"):
        yield ((tensor(3, 4),), {"dtype": torch.float16})
        yield ((tensor(3, 4),), {"dtype": torch.float32, "device": torch.device("meta"), "pin_memory": False})
        yield ((tensor(2, 3, 4, 4, layout="channels_last"),), {"memory_format": torch.preserve_format})
        yield ((tensor(2, 3, 4, 4),), {"memory_format": torch.channels_last})
        yield ((tensor(2, 3, 4, 4, layout="channels_last"),), {"memory_format": torch.contiguous_format})


def gradient_cases(operator: Any) -> Iterator[Case]:
    extra: dict[str, tuple[Any, ...]] = {
        "threshold_backward": (0.0,), "softplus_backward": (1, 20), "leaky_relu_backward": (0.1, False),
        "hardtanh_backward": (-1.0, 1.0), "native_dropout_backward": (2.0,),
    }  # fmt: skip
    name = name_of(operator).split(".")[0]
    for shape, dtype, first, second in itertools.product(SHAPES_OF_INPUTS, DTYPES, LAYOUTS, LAYOUTS):
        grad = tensor(*shape, dtype=dtype, layout=first)
        other = tensor(*shape, dtype=torch.bool if "dropout" in name else dtype, layout=second)
        if name == "elu_backward":
            yield ((grad, 1.0, 1.0, 1.0, False, other), {})
        else:
            yield ((grad, other, *extra.get(name, ())), {})


def binary_cases(operator: Any) -> Iterator[Case]:
    for a in inputs((torch.float32, torch.bfloat16)):
        for b in (2, 0.5, tensor(), tensor(dtype=torch.float64), torch.tensor(2.0), torch.tensor(2)):
            yield ((a, b), {})
        for layout, dtype in itertools.product(LAYOUTS, (torch.float32, torch.bfloat16, torch.int64)):
            yield ((a, tensor(*a.shape, dtype=dtype, layout=layout)), {})
    for first, second in itertools.product(LAYOUTS, LAYOUTS):
        for a, b in (
            ((4, 6), (6,)),
            ((2, 3, 4, 5), (3, 1, 1)),
            ((2, 3, 4, 5), (2, 3, 1, 1)),
            ((4, 1), (1, 6)),
            ((6,), (4, 6)),
        ):
            yield ((tensor(*a, layout=first), tensor(*b, layout=second)), {})
    yield ((tensor(4, dtype=torch.int64), tensor(4)), {})


def normalisation_cases(operator: Any) -> Iterator[Case]:
    name = name_of(operator).split(".")[0]
    for dtype, layout, affine in itertools.product(DTYPES, LAYOUTS, (True, False)):
        x = tensor(2, 6, 4, 5, dtype=dtype, layout=layout)
        grad = tensor(2, 6, 4, 5, dtype=dtype)
        weight = tensor(6, dtype=dtype) if affine else None
        few, groups = tensor(6), tensor(2, 3, dtype=dtype)
        for mask in itertools.product((True, False), repeat=3):
            masked = [mask[0], *(item and affine for item in mask[1:])]
            if name == "native_batch_norm_backward":
                yield ((grad, x, weight, few, few, few, few, True, 1e-5, masked), {})
            elif name == "native_group_norm_backward":
                yield ((grad, x, groups, groups, weight, 2, 6, 20, 3, masked), {})
            elif name == "native_layer_norm_backward":
                scale = tensor(4, 5, dtype=dtype) if affine else None
                rows = tensor(2, 6, 1, 1)
                yield ((grad, x, [4, 5], rows, rows, scale, scale, masked), {})
        if name == "native_batch_norm":
            for training in (True, False):
                yield ((x, weight, weight, few, few, training, 0.1, 1e-5), {})
            yield ((tensor(7, 6, dtype=dtype), weight, weight, few, few, True, 0.1, 1e-5), {})
        elif name == "native_group_norm":
            yield ((x, weight, weight, 2, 6, 20, 3, 1e-5), {})
        elif name == "native_layer_norm":
            scale = tensor(5, dtype=dtype) if affine else None
            yield ((x, [5], scale, scale, 1e-5), {})


def softmax_cases(operator: Any) -> Iterator[Case]:
    for x in inputs():
        if x.dim():
            backward = "backward" in name_of(operator)
            yield ((x, x, x.dim() - 1, x.dtype) if backward else (x, -1, False)), {}
    if "backward" not in name_of(operator):
        yield ((tensor(4, 6), 0, False), {})


def loss_cases(operator: Any) -> Iterator[Case]:
    name = name_of(operator)
    spatial = (4, 5) if "2d" in name else ()
    for dtype, reduction in itertools.product(DTYPES, (0, 1, 2)):
        x = tensor(3, 7, *spatial, dtype=dtype)
        target = torch.empty((3, *spatial), dtype=torch.int64, device="meta")
        if "backward" in name:
            grad = tensor(*target.shape, dtype=dtype) if reduction == 0 else tensor(dtype=dtype)
            yield ((grad, x, target, None, reduction, -100, tensor(dtype=dtype)), {})
        else:
            yield ((x, target, None, reduction, -100), {})


def matrix_cases(operator: Any) -> Iterator[Case]:
    name = name_of(operator)
    batch = (2,) if "bmm" in name else ()
    for dtype, first, second in itertools.product(DTYPES, LAYOUTS, LAYOUTS):
        a, b = tensor(*batch, 3, 4, dtype=dtype, layout=first), tensor(*batch, 4, 5, dtype=dtype, layout=second)
        yield ((tensor(5, dtype=dtype), a, b) if "add" in name else (a, b)), {}


def embedding_cases(operator: Any) -> Iterator[Case]:
    for dtype, shape in itertools.product(DTYPES, ((), (3,), (3, 4))):
        indices = torch.empty(shape, dtype=torch.int64, device="meta")
        if "backward" in name_of(operator):
            yield ((tensor(*shape, 8, dtype=dtype), indices, 10, -1, False), {})
        else:
            yield ((tensor(10, 8, dtype=dtype), indices), {})


def cat_cases(operator: Any) -> Iterator[Case]:
    for x in inputs((torch.float32, torch.bfloat16)):
        for dim in range(-x.dim(), x.dim()):
            yield (([x, x, x], dim), {})
    yield (([tensor(2, 3), tensor(2, 3, dtype=torch.float16)],), {})
    yield (([tensor(0), tensor(2, 3)],), {})
    yield (([tensor(2, 3, 4, 4), tensor(2, 3, 4, 4, layout="channels_last")], 1), {})


def reduction_cases(operator: Any) -> Iterator[Case]:
    for x in inputs((torch.float32, torch.bfloat16)):
        for dims in ([0], [-1], [0, -1], [], None):
            if dims and x.dim() < 2:
                continue
            for keepdim, dtype in itertools.product((True, False), (None, torch.float32)):
                yield ((x, dims, keepdim), {"dtype": dtype})


def other_cases(operator: Any) -> Iterator[Case]:
    name = name_of(operator)
    for x in inputs():
        if name == "native_dropout.default":
            yield ((x, 0.5, True), {})  # composite operators call it in training alone
        elif name == "_prelu_kernel_backward.default":
            yield ((torch.empty_like(x), x, torch.empty_like(x)), {})
        elif name == "slice_backward.default" and x.dim() > 1:
            yield ((x, [x.shape[0], 2 * x.shape[1], *x.shape[2:]], 1, 0, x.shape[1], 1), {})
        elif name == "log_sigmoid_forward.default":
            yield ((x,), {})


def grouped_cases(operator: Any) -> Iterator[Case]:
    """Experts' products and the gradients of their weights, in the one precision that torch's meta function takes."""
    offsets = torch.empty(4, dtype=torch.int32, device="meta")
    x, grad = (torch.empty(24, size, dtype=torch.bfloat16, device="meta") for size in (16, 32))
    yield ((x, torch.empty(4, 16, 32, dtype=torch.bfloat16, device="meta"), offsets), {})
    yield ((x.T, grad, offsets), {})


FAMILIES = {
    unary_cases: lambda name: True,
    gradient_cases: lambda name: name.endswith("_backward.default"),
    binary_cases: lambda name: name.endswith(".Tensor"),
    normalisation_cases: lambda name: "_norm" in name,
    softmax_cases: lambda name: "softmax" in name,
    loss_cases: lambda name: "nll_loss" in name,
    matrix_cases: lambda name: name.split(".")[0].endswith(("mm", "bmm")),
    grouped_cases: lambda name: name == "_grouped_mm.default",
    embedding_cases: lambda name: name.startswith("embedding"),
    cat_cases: lambda name: name == "cat.default",
    reduction_cases: lambda name: name in ("sum.dim_IntList", "mean.dim"),
    other_cases: lambda name: (
        name
        in (
            "native_dropout.default",
            "_prelu_kernel_backward.default",
            "log_sigmoid_forward.default",
            "slice_backward.default",
        )
    ),
}


def name_of(operator: Any) -> str:
    return str(operator).removeprefix("aten.")


def cases_of(operator: Any) -> list[Case]:
    found = [family for family, takes in FAMILIES.items() if takes(name_of(operator))]
    return list(found[-1](operator))  # the last family that takes an operator is the most special


def as_tuple(out: Any) -> tuple[Any, ...]:
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def description(item: Tensor | None, layout: bool) -> Any:
    """What decides memory and later layouts; a dimension of one element has no layout."""
    if item is None:
        return None
    strides = tuple(step for step, size in zip(item.stride(), item.shape, strict=True) if size > 1)
    return tuple(item.shape), item.dtype, strides if layout and item.numel() else ()


@pytest.mark.parametrize("operator", SHAPES, ids=name_of)
def test_rule_agrees_with_torch(operator: Any) -> None:
    applied = 0
    for args, kwargs in cases_of(operator):
        ours = SHAPES[operator](*args, **kwargs)
        if ours is NotImplemented:
            continue
        applied += 1
        theirs = operator(*args, **kwargs)
        layout = operator not in LAYOUT_DIFFERS
        ours, theirs = ([description(item, layout) for item in as_tuple(out)] for out in (ours, theirs))
        if operator in DELIBERATE:
            ours, theirs = ours[:1], theirs[:1]
        assert ours == theirs, (args, kwargs)
    assert applied


@pytest.mark.parametrize("operator", [item for item in SHAPES if "mm" in name_of(item)], ids=name_of)
def test_matrices_that_do_not_fit_are_left_to_torch(operator: Any) -> None:
    batch = (2,) if "bmm" in name_of(operator) else ()
    a, b = tensor(*batch, 3, 4), tensor(*batch, 5, 6)
    args = (tensor(6), a, b) if "add" in name_of(operator) else (a, b)
    assert SHAPES[operator](*args) is NotImplemented


@pytest.mark.parametrize("operator", DELIBERATE, ids=name_of)
def test_deliberate_differences(operator: Any) -> None:
    """The first output agrees with torch, see above; what is kept beside it is CUDA's."""
    for args, kwargs in cases_of(operator):
        kept = SHAPES[operator](*args, **kwargs)[1:]
        if operator is aten.log_sigmoid_forward.default:
            assert [item.numel() for item in kept] == [0]
        else:
            assert {item.dtype for item in kept} == {torch.float32}
            assert [item.shape for item in kept] == [item.shape for item in operator(*args, **kwargs)[1:]]
