"""Modules without numbers: built so, or copied so. What would fill a rack is built in the memory of its structure."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from vramcast.errors import UserError


def built_on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """What a function makes, on the meta device: no weight is ever initialised.

    Constructors that compute with values, which meta tensors do not have, get real tensors for the time of a layer.
    """
    try:
        with torch.device("meta"), _NoCuda():
            module = make()
    except (NotImplementedError, RuntimeError) as error:
        try:
            with _parameters_on_meta(), _LargeOnMeta(), _NoCuda():
                module = make()
        except Exception as second:
            raise second from error if type(second) is not type(error) else None
    return on_meta(module)


def on_meta(module: nn.Module) -> nn.Module:
    """The module where all of it is on meta already, else its structure; `.to` would untie weights that are shared."""
    if not isinstance(module, nn.Module):
        raise UserError(f"expected a torch.nn.Module, found {type(module).__name__}: return one from the factory")
    tensors = [*module.parameters(), *module.buffers()]
    placed = module if all(item.is_meta for item in tensors) else structure_of(module)
    return placed.to("meta")  # moves nothing, but tells those that remember their device (Lightning)


def structure_of(module: nn.Module) -> nn.Module:
    """A copy on the meta device that shares nothing with the module; no number is copied."""
    memo: dict[int, Any] = {}
    for part in module.modules():
        held = (*part._parameters.values(), *part._buffers.values(), *vars(part).values())
        for item in held:
            if isinstance(item, Tensor):
                memo[id(item)] = _bare(item)
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:  # whatever a foreign class raises
        raise UserError(
            f"expected a module that can be copied, found {type(module).__name__} with {error}: "
            "build it on the meta device, and hand over a function that does so"
        ) from error


def _bare(item: Tensor) -> Tensor:
    if nn.parameter.is_lazy(item):
        raise UserError("expected a module whose shapes are known, found a lazy one: run a batch through it first")
    bare = torch.empty_like(item, device="meta", requires_grad=False)
    return nn.Parameter(bare, item.requires_grad) if isinstance(item, nn.Parameter) else bare


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules take their parameters to meta as they get them; what is freed at once is hardly ever touched."""
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        bare = _bare(param) if isinstance(param, nn.Parameter) and not param.is_meta else param
        original(self, name, bare)  # type: ignore[arg-type]

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


_SMALL = 2**24
"""Elements up to which a tensor of a constructor is real: nobody computes a learning rate from more."""


class _LargeOnMeta(TorchFunctionMode):
    """Makes large tensors on meta, and small ones where they are wanted."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _device_constructors() and kwargs.get("device") is None and _elements(args, kwargs) > _SMALL:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _elements(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Of the shape that a function like torch.empty is given, in one of its two ways."""
    sizes = kwargs.get("size", args[0] if args and isinstance(args[0], tuple | list) else args)
    return prod(size for size in sizes if isinstance(size, int)) if isinstance(sizes, tuple | list) else 0


def _is_cuda(value: Any) -> bool:
    return (isinstance(value, str) and value.startswith("cuda")) or (
        isinstance(value, torch.device) and value.type == "cuda"
    )


class _NoCuda(TorchFunctionMode):
    """Whatever is to go to a card goes to meta."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            return args[0].to("meta")
        if any(map(_is_cuda, args)) or _is_cuda(kwargs.get("device")):
            args = tuple("meta" if _is_cuda(item) else item for item in args)
            kwargs = {name: "meta" if _is_cuda(value) else value for name, value in kwargs.items()}
        return func(*args, **kwargs)
