"""Keep torch from importing its compiler while nothing is compiled: the import takes longer than the trace of a ResNet.

Methods of optimizers and of dispatch modes import the compiler to tell it that it must leave them alone, and
`Optimizer.step` to break its graphs. Checked with torch 2.6 and 2.13.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

_COMPILER = "torch._dynamo"
_LEFT_ALONE = "__dynamo_disable"
"""Where torch keeps the form of a function that its compiler leaves alone (torch/_compile.py, _disable_dynamo)."""
_BREAKS_GRAPHS = "_use_grad"
"""The wrapper of a step (torch/optim/optimizer.py, _use_grad_for_differentiable)."""


@contextmanager
def without_compiler() -> Iterator[None]:
    """Let optimizers and dispatch modes run as they are, unless something has imported the compiler before."""
    functions = [] if _COMPILER in sys.modules else [*vars(Optimizer).values(), *_dispatch_functions(TorchDispatchMode)]
    originals = [getattr(item, "__wrapped__", None) for item in functions]
    changed = [item for item in originals if item is not None and not hasattr(item, _LEFT_ALONE)]
    for function in changed:
        setattr(function, _LEFT_ALONE, function)
    try:
        yield
    finally:
        for function in changed:
            delattr(function, _LEFT_ALONE)


def _dispatch_functions(mode: type[TorchDispatchMode]) -> Iterator[Any]:
    kind: type[TorchDispatchMode]
    for kind in mode.__subclasses__():
        yield vars(kind).get("__torch_dispatch__")
        yield from _dispatch_functions(kind)


def with_plain_step(optimizer: Optimizer) -> Optimizer:
    """Let an optimizer step without breaking graphs, unless something has imported the compiler before."""
    step: Any = getattr(type(optimizer).step, "__wrapped__", None)  # below the hooks
    plain = getattr(step, "__wrapped__", None)
    if _COMPILER not in sys.modules and plain is not None and step.__code__.co_name == _BREAKS_GRAPHS:
        hooked = Optimizer.profile_hook_step(_with_own_gradients(plain))
        optimizer.step = MethodType(hooked, optimizer)  # type: ignore[method-assign]
    return optimizer


def _with_own_gradients(step: Callable[..., Any]) -> Callable[..., Any]:
    """Record gradients in a step if the optimizer is differentiable, as torch's wrapper does."""

    @wraps(step)
    def recorded(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            return step(optimizer, *args, **kwargs)

    return recorded
