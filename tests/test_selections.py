"""Gradients of selections take one tensor of the input's size, as torch without a dispatch mode does."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from meta_traces import numbers, told
from torch import Tensor

_ROWS, _COLUMNS = 64, 128
_WHOLE = _ROWS * _COLUMNS * 4


def _places(like: Tensor, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long, device=like.device)


SELECTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: x.max(1)[0],
    "min": lambda x: x.min(1)[0],
    "median": lambda x: x.median(1)[0],
    "nanmedian": lambda x: x.nanmedian(1)[0],
    "mode": lambda x: x.mode(1)[0],
    "kthvalue": lambda x: x.kthvalue(3, 1)[0],
    "topk": lambda x: x.topk(3, 1)[0],
    "sort": lambda x: x.sort(1)[0],
    "stable sort": lambda x: x.sort(dim=1, stable=True)[0],
    "cummax": lambda x: x.cummax(1)[0],
    "cummin": lambda x: x.cummin(1)[0],
    "gather": lambda x: x.gather(1, _places(x, _ROWS, 2)),
    "index_select": lambda x: x.index_select(0, _places(x, 3)),
    "take": lambda x: x.take(_places(x, 3)),
}


@pytest.fixture(autouse=True)
def any_kernel() -> Iterator[None]:
    """Allow kernels that are not deterministic: a trainer of another test may have forbidden them."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(before)


def cpu_allocations(select: Callable[[Tensor], Tensor]) -> int:
    """Return how many tensors as large as the input torch allocates in the backward pass, on the CPU without a mode."""
    out = select(torch.randn(_ROWS, _COLUMNS, requires_grad=True))
    gradient = torch.ones_like(out)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        out.backward(gradient)
    kineto: Any = profile.profiler
    sizes = [item.nbytes() for item in kineto.kineto_results.events() if item.name() == "[memory]"]
    return sizes.count(_WHOLE)


@pytest.mark.parametrize("name", SELECTIONS)
def test_the_gradient_of_a_selection_is_written_into_its_zeros(name: str) -> None:
    select, x = SELECTIONS[name], numbers(_ROWS, _COLUMNS, grad=True)
    selected: list[Tensor] = []
    gradient = torch.empty_like(select(x))

    def forward() -> None:
        selected.append(select(x))

    def both() -> None:
        select(x).backward(gradient)

    story = told(both, x, gradient)
    in_backward = story.count(_WHOLE) - told(forward, x).count(_WHOLE)
    assert in_backward == cpu_allocations(select) == 1


class _WithOwnGradient(torch.autograd.Function):
    """A user's gather, whose gradient keeps zeros beside the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        return x.gather(1, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        return torch.zeros(_ROWS, _COLUMNS, device=grad.device).scatter_add(1, index, grad), None


def test_a_users_own_gradient_keeps_the_result_that_it_asks_for() -> None:
    x = numbers(_ROWS, _COLUMNS, grad=True)
    index = _places(x, _ROWS, 2)

    def select(x: Tensor) -> Tensor:
        return _WithOwnGradient.apply(x, index.to(x.device) if x.is_meta else _places(x, _ROWS, 2))  # type: ignore[no-untyped-call, no-any-return]

    story = told(lambda: select(x).sum().backward(), x, index)
    assert story.count(_WHOLE) == cpu_allocations(select) == 2


def test_a_forward_pass_keeps_the_result_that_it_asks_for() -> None:
    x, index = numbers(_ROWS, _COLUMNS), _places(numbers(1), _ROWS, 2)
    values = numbers(_ROWS, 2)
    results: list[Tensor] = []
    assert told(lambda: results.append(x.scatter_add(1, index, values)), x, index, values) == [_WHOLE]
    assert told(lambda: results.append(x.scatter(1, index, values)), x, index, values) == [_WHOLE]
