"""Copies and buffers inside CUDA kernels that torch's meta functions do not show."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch.nn import functional as F

from vramcast import VirtualGPU
from vramcast.virtual_gpu.operators.contiguity import contiguous, suggested_layout
from vramcast.virtual_gpu.operators.cuda_paths import cuda_paths
from vramcast.virtual_gpu.operators.kernels import _is_matrix, cuda_kernels
from vramcast.virtual_gpu.replay.replay import FREE
from vramcast.virtual_gpu.tracing.trace import ConvolutionCall, ReductionCall, Trace, Tracer, call_of

aten = torch.ops.aten


def numbers(*shape: int, grad: bool = False) -> Tensor:
    return torch.empty(shape, device="meta", requires_grad=grad)


def channels_last(x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last)


def traced(step: Callable[[], Any]) -> Trace:
    tracer = Tracer(cuda_kernels())
    with cuda_paths(), tracer:
        result = step()
    del result
    return tracer.trace


def transients(step: Callable[[], Any]) -> list[int]:
    """Return the sizes of blocks that are freed before the step ends, without library calls; results are kept."""
    tracer = Tracer(cuda_kernels())
    with cuda_paths(), tracer:
        result = step()
        events = list(tracer.trace.events)
    del result
    sizes = {block: size for block, size in events if size != FREE}
    freed = [sizes[block] for block, size in events if size == FREE and block in sizes]
    return [size for size in freed if call_of(size) is None]


def test_a_layer_norm_copies_an_input_that_is_not_contiguous() -> None:
    x, weight = numbers(4, 32, 16).transpose(1, 2), numbers(32)
    straight = x.contiguous()
    assert transients(lambda: aten.native_layer_norm(x, [32], weight, weight, 1e-5)) == [4 * x.numel()]
    assert transients(lambda: aten.native_layer_norm(straight, [32], weight, weight, 1e-5)) == []


def test_the_gradient_of_a_layer_norm_copies_gradient_and_input() -> None:
    x, grad, weight, row = numbers(4, 32, 16).transpose(1, 2), numbers(4, 16, 32), numbers(32), numbers(4, 16, 1)

    def step(grad: Tensor) -> Any:
        return aten.native_layer_norm_backward(grad, x, [32], row, row, weight, weight, [True, True, True])

    turned = torch.empty_like(x)
    assert transients(lambda: step(grad)) == [4 * x.numel()]
    assert transients(lambda: step(turned)) == [4 * x.numel()] * 2


@pytest.mark.parametrize("function", [F.softmax, F.log_softmax])
def test_a_softmax_copies_an_input_that_is_not_contiguous(function: Callable[..., Tensor]) -> None:
    x = numbers(8, 16, 4)
    assert transients(lambda: function(x.transpose(1, 2), dim=-1)) == [4 * 8 * 16 * 4]
    assert transients(lambda: function(x, dim=-1)) == []


def test_batch_norm_copies_the_gradient_of_a_concatenation() -> None:
    norm = nn.BatchNorm2d(8, device="meta")
    grad = numbers(2, 16, 4, 4)[:, :8]  # half of the gradient of a concatenated tensor
    x, statistics = numbers(2, 8, 4, 4), numbers(8)

    def step(grad: Tensor) -> Any:
        return aten.native_batch_norm_backward(
            grad, x, norm.weight, statistics, statistics, statistics, statistics, True, 1e-5, [True, True, True]
        )

    assert transients(lambda: step(grad)) == [4 * 2 * 8 * 4 * 4]
    straight = grad.contiguous()
    assert transients(lambda: step(straight)) == []


def convolution_gradients(x: Tensor, grad: Tensor, weight: Tensor) -> Any:
    return aten.convolution_backward(
        grad, x, weight, [weight.shape[0]], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]
    )


def test_a_convolution_copies_a_gradient_in_another_layout() -> None:
    x, weight, grad = numbers(2, 8, 6, 6), numbers(16, 8, 3, 3), numbers(2, 16, 6, 6)
    assert transients(lambda: convolution_gradients(x, grad, weight)) == []
    other = channels_last(grad)
    assert transients(lambda: convolution_gradients(x, other, weight)) == [4 * grad.numel()]


def test_a_convolution_in_channels_last_copies_the_weight_alone() -> None:
    x, weight, grad = channels_last(numbers(2, 8, 6, 6)), numbers(16, 8, 3, 3), channels_last(numbers(2, 16, 6, 6))
    assert transients(lambda: F.conv2d(x, weight, padding=1)) == [4 * weight.numel()]
    assert transients(lambda: convolution_gradients(x, grad, weight)) == [4 * weight.numel()]
    with cuda_paths(), Tracer(cuda_kernels()):
        made = convolution_gradients(x, grad, weight)
    assert all(item.is_contiguous(memory_format=torch.channels_last) for item in made[:2])


@pytest.mark.parametrize(
    ("layout", "buffer_bytes"), [(torch.channels_last, 4 * 64 * 64), (torch.contiguous_format, 4 * 64)]
)
def test_the_gradient_of_a_bias_is_a_sum_in_the_layout_of_the_gradient(
    layout: torch.memory_format, buffer_bytes: int
) -> None:
    x, weight = numbers(64, 64, 128, 128), numbers(64, 64, 3, 3)
    grad = numbers(64, 64, 128, 128).to(memory_format=layout)
    calls = traced(lambda: convolution_gradients(x, grad, weight)).calls
    (reduction,) = (item for item in calls if isinstance(item, ReductionCall))
    assert isinstance(calls[-1], ReductionCall)
    assert sum(isinstance(item, ConvolutionCall) for item in calls) == 2
    assert reduction.bytes_a_split == buffer_bytes


def test_a_sum_of_truth_values_converts_them_to_integers() -> None:
    mask = torch.empty((64, 100), dtype=torch.bool, device="meta")
    assert transients(lambda: mask.sum(dim=0)) == [8 * 64 * 100]
    assert transients(mask.sum) == [8 * 64 * 100]
    x = numbers(64, 100)
    assert transients(lambda: x.sum(dim=0)) == []
    with Tracer(cuda_kernels()):
        assert mask.sum(dim=0).dtype == torch.int64


def test_the_gradient_of_a_maximum_counts_its_places_as_integers() -> None:
    x = numbers(32, 4, 64, grad=True)
    trace = traced(lambda: x.amax(dim=1).sum().backward())
    assert 8 * 32 * 4 * 64 in [size for _, size in trace.events]


def test_a_product_copies_a_matrix_that_cublas_cannot_read() -> None:
    a, b = numbers(8, 16, 32), numbers(8, 32, 4)
    turned, spread, every_other = torch.empty_like(b.mT).mT, numbers(8, 1, 1).expand(8, 16, 32), numbers(16, 64)[:, ::2]
    assert transients(lambda: torch.bmm(a, b)) == []
    assert transients(lambda: torch.bmm(a, turned)) == []
    assert transients(lambda: torch.bmm(spread, b)) == [4 * 8 * 16 * 32]
    assert transients(lambda: torch.mm(every_other, b[0])) == [4 * 16 * 32]


def test_a_linear_layer_copies_a_matrix_that_cublas_cannot_read() -> None:
    bias, every_other, b = numbers(4), numbers(16, 64)[:, ::2], numbers(32, 4)
    assert transients(lambda: torch.addmm(bias, every_other, b)) == [4 * 16 * 32]


def test_a_sparse_matrix_is_not_copied() -> None:
    places = torch.zeros((2, 10), dtype=torch.int64, device="meta")
    sparse = torch.sparse_coo_tensor(places, numbers(10), (10**6, 10**6), device="meta", check_invariants=False)
    assert _is_matrix(sparse)
    assert contiguous(Tracer(cuda_kernels()), sparse) is sparse


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_a_single_number_can_be_summed(dtype: torch.dtype) -> None:
    number = torch.empty((), dtype=dtype, device="meta")
    with Tracer(cuda_kernels()):
        assert number.sum(0).shape == ()


def test_a_sum_in_another_precision_converts_its_input_but_for_half() -> None:
    x, half = numbers(64, 100), torch.empty((64, 100), dtype=torch.float16, device="meta")
    assert transients(lambda: x.sum(0, dtype=torch.float64)) == [8 * 64 * 100]
    assert transients(lambda: half.sum(0, dtype=torch.float32)) == []


@pytest.mark.parametrize(
    "x",
    [
        numbers(2, 8, 6, 6),
        channels_last(numbers(2, 8, 6, 6)),
        channels_last(numbers(8, 1, 6, 6)),
        channels_last(numbers(2, 8, 6, 6)).chunk(2, 1)[0],
        numbers(2, 8, 6, 6)[:, :4],
        numbers(2, 8, 1, 1),
        numbers(2, 8, 4, 6, 6).to(memory_format=torch.channels_last_3d),
        numbers(2, 1, 1, 1).expand(2, 8, 6, 6),
        numbers(8, 16),
    ],
)
def test_a_layout_is_suggested_as_by_torch(x: Tensor) -> None:
    assert suggested_layout(x) == suggest_memory_format(x)


def test_a_transposed_convolution_keeps_channels_last() -> None:
    x, weight = channels_last(numbers(2, 8, 6, 6)), numbers(8, 16, 3, 3)
    assert transients(lambda: F.conv_transpose2d(x, weight)) == [4 * weight.numel()]
    with Tracer(cuda_kernels()):
        assert suggested_layout(F.conv_transpose2d(x, weight)) == torch.channels_last


def test_the_gradient_of_indexing_is_allocated_once() -> None:
    table, places = numbers(5000, 8, grad=True), torch.zeros(1000, dtype=torch.int64, device="meta")
    trace = traced(lambda: table[places].sum().backward())
    assert [size for _, size in trace.events].count(4 * 5000 * 8) == 1


def test_a_script_sorts_the_indices_of_a_gradient_too() -> None:
    with VirtualGPU("a100_40gb") as gpu:
        table = torch.zeros(50, 8, device="cuda", requires_grad=True)
        places = torch.zeros(1_000_000, dtype=torch.int64, device="cuda")
        picked = table[places]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        picked.sum().backward()
        peak = torch.cuda.max_memory_allocated()
    assert gpu is not None
    assert peak - before > 6 * 8 * 1_000_000


def test_the_gradient_of_indexing_sorts_the_indices() -> None:
    table, places = numbers(50, 8, grad=True), torch.zeros(1000, dtype=torch.int64, device="meta")
    trace = traced(lambda: table[places].sum().backward())
    sizes = [size for _, size in trace.events]
    assert sizes.count(8 * 1000) == 4  # linear, sorted and original indices, and a range
    assert 8 * (2 * 1000 + 512) in sizes
    untouched = traced(lambda: numbers(50, 8).index_put((places,), numbers(1000, 8)))
    assert 8 * 1000 not in [size for _, size in untouched.events]
