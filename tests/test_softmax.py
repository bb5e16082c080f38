"""Softmax of half precision on CUDA, compared with torch's own choice for tensors that name CUDA and have no data."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from meta_traces import BFLOAT, HALF, SINGLE, Recorder, numbers, operators, told
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

_ELEMENTS = 32 * 64


def operators_on_cuda(run: Callable[[Tensor], Tensor], dtype: torch.dtype, autocast: torch.dtype | None) -> list[str]:
    """Return the operators of a tensor on CUDA by torch's own dispatcher: a fake tensor needs no device."""
    with FakeTensorMode(), Recorder() as recorded:
        x = torch.empty(32, 64, dtype=dtype, device="cuda")
        recorded.names.clear()
        before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        torch.set_autocast_enabled("cuda", autocast is not None)
        torch.set_autocast_dtype("cuda", autocast or before[1])
        try:
            run(x)
        finally:
            torch.set_autocast_enabled("cuda", before[0])
            torch.set_autocast_dtype("cuda", before[1])
    return [name for name in recorded.names if not name.startswith("prim::")]


@pytest.mark.parametrize("function", [F.softmax, F.log_softmax])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT, SINGLE])
@pytest.mark.parametrize("wanted", [None, SINGLE, HALF])
@pytest.mark.parametrize("autocast", [None, HALF, BFLOAT])
def test_softmax_runs_the_operators_that_torch_runs_on_cuda(
    function: Callable[..., Tensor], dtype: torch.dtype, wanted: torch.dtype | None, autocast: torch.dtype | None
) -> None:
    def run(x: Tensor) -> Tensor:
        return function(x, -1, dtype=wanted)

    x = numbers(32, 64, dtype=dtype)

    def on_virtual_gpu() -> None:
        with torch.autocast("cuda", autocast) if autocast else nullcontext():
            run(x)

    assert operators(on_virtual_gpu) == operators_on_cuda(run, dtype, autocast)


def test_single_precision_of_float16_takes_no_copy() -> None:
    # forward: the output, 4 bytes an element (cuda/SoftMax.cu, host_softmax), the sum, and the gradient of that; then
    # the input's gradient, 2 bytes, and the product of gradient and output, 4 bytes (softmax_backward_cuda_out)
    x = numbers(32, 64, dtype=HALF, grad=True)
    story = told(lambda: F.softmax(x, -1, dtype=SINGLE).sum().backward(), x)
    assert story == [4 * _ELEMENTS, 4, 4, 2 * _ELEMENTS, 4 * _ELEMENTS, -4 * _ELEMENTS, -4 * _ELEMENTS, -4, -4]
    y = numbers(32, 64, dtype=BFLOAT, grad=True)
    assert told(lambda: F.softmax(y, -1, dtype=SINGLE), y)[:2] == [4 * _ELEMENTS] * 2  # the copy, and the output
