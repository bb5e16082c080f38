"""Outputs whose storage is larger than they are, because their kernels resize them."""

from collections.abc import Callable
from math import prod

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vramcast import VirtualGPU
from vramcast.virtual_gpu.operators.cuda_paths import cuda_paths
from vramcast.virtual_gpu.operators.kernels import cuda_kernels
from vramcast.virtual_gpu.replay.replay import FREE
from vramcast.virtual_gpu.tracing.trace import Tracer

ELEMENTS = 64 * 100
COLUMNS = (4 * 9, 8 * 8)
LOSSES = (F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy, F.soft_margin_loss)


def storage_bytes(step: Callable[[Tensor], Tensor], *shape: int, device: str) -> int:
    """Return the size of a result's storage: on the CPU by torch itself, on meta by our kernels."""
    x = torch.rand(shape, device=device, requires_grad=True)
    if device == "cpu":
        return step(x).untyped_storage().nbytes()
    with cuda_paths(), Tracer(cuda_kernels()):
        return step(x).untyped_storage().nbytes()


def unfold(x: Tensor) -> Tensor:
    return F.unfold(x, 3, padding=1)


def fold(x: Tensor) -> Tensor:
    return F.fold(x, (8, 8), 3, padding=1)


def gradient_of_unfold(x: Tensor) -> Tensor:
    return torch.autograd.grad(unfold(x).sum(), x)[0]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_keeps_the_storage_that_torch_keeps(loss, reduction):
    def step(x: Tensor) -> Tensor:
        return loss(x, torch.zeros_like(x), reduction=reduction)

    size = storage_bytes(step, 64, 100, device="meta")
    assert size == storage_bytes(step, 64, 100, device="cpu") == 4 * ELEMENTS


@pytest.mark.parametrize("loss", [F.l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits])
def test_other_losses_keep_a_number(loss):
    def step(x: Tensor) -> Tensor:
        return loss(x, torch.zeros_like(x))

    assert storage_bytes(step, 64, 100, device="meta") == storage_bytes(step, 64, 100, device="cpu") == 4


@pytest.mark.parametrize(("step", "shape"), [(unfold, (4, 8, 8)), (fold, COLUMNS), (gradient_of_unfold, (4, 8, 8))])
@pytest.mark.parametrize("samples", [(), (2,)])
def test_columns_and_images_have_the_storage_of_columns(step, shape, samples):
    size = storage_bytes(step, *samples, *shape, device="meta")
    assert size == storage_bytes(step, *samples, *shape, device="cpu") == 4 * prod(samples) * 4 * 9 * 8 * 8


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("dilation", [1, 2])
def test_shapes_are_those_of_torch(stride, dilation):
    def step(x: Tensor) -> Tensor:
        return F.unfold(x, (3, 2), dilation, (1, 2), (stride, 1))

    with cuda_paths(), Tracer(cuda_kernels()):
        out = step(torch.empty(2, 4, 9, 7, device="meta"))
    expected = step(torch.empty(2, 4, 9, 7))
    assert (out.shape, out.stride()) == (expected.shape, expected.stride())


def test_columns_larger_than_the_input_leave_its_first_output():
    tracer = Tracer(cuda_kernels())
    x = torch.empty(2, 4, 8, 8, device="meta").to(memory_format=torch.channels_last)
    with cuda_paths(), tracer:
        out = unfold(x)
        events = list(tracer.trace.events)
    assert [size for _, size in events if size != FREE] == [4 * x.numel(), 4 * x.numel(), 4 * out.numel()]
    assert sum(size == FREE for _, size in events) == 2


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss])
def test_a_loss_of_two_dtypes_has_elements_of_the_wider_one(loss):
    def step(x: Tensor) -> Tensor:
        return loss(x.bfloat16(), torch.zeros_like(x))

    size = storage_bytes(step, 64, 100, device="meta")
    assert size == storage_bytes(step, 64, 100, device="cpu") == 4 * ELEMENTS


@pytest.mark.parametrize(
    ("step", "shape"),
    [
        (lambda x: F.unfold(x, 9), (2, 4, 6, 6)),  # blocks of -2 x -2
        (lambda x: F.unfold(x, 3), (2, 4, 2, 8)),
        (fold, (2, 37, 64)),
        (fold, (2, 36, 50)),
        (lambda x: F.mse_loss(x, torch.zeros(8, 3, device=x.device)), (8, 4)),
    ],
)
def test_what_torch_refuses_is_refused(step, shape):
    for device in ("cpu", "meta"):
        with pytest.raises(RuntimeError):
            storage_bytes(step, *shape, device=device)


def test_the_mean_of_a_loss_holds_an_output_after_the_step():
    elements = 8 * 16 * 256 * 256

    def held(loss: Callable[[Tensor, Tensor], Tensor]) -> int:
        """Return the memory that a loss which is still referenced holds after its backward pass."""
        with VirtualGPU("a100_40gb"):
            network = nn.Conv2d(3, 16, 3, padding=1).cuda()
            error = loss(network(torch.empty(8, 3, 256, 256, device="cuda")), torch.zeros(8, 16, 256, 256).cuda())
            error.backward()
            before = torch.cuda.memory_allocated()
            del error
            return before - torch.cuda.memory_allocated()

    assert held(F.mse_loss) == 4 * elements
    assert held(F.huber_loss) == 512
