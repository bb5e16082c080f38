"""Builds modules on the meta device, or copies them there: networks of any size without memory for their weights."""

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
from vramcast.virtual_gpu.tracing.owners import is_keras


def build_on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """Call a factory on the meta device, without initialising any weight.

    Constructors that compute with values, which meta tensors do not have, run again on real tensors, and each parameter
    moves to the meta device when its module registers it.
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
    return to_meta(module)


def to_meta(module: nn.Module) -> nn.Module:
    """Return the module if all of it is on meta, else a copy there; `.to` alone would untie shared weights."""
    if not isinstance(module, nn.Module):
        raise UserError(f"expected a torch.nn.Module, found {type(module).__name__}: return one from the factory")
    if is_keras(module):  # it chooses its device itself, and is made again on the virtual GPU
        return module
    tensors = [*module.parameters(), *module.buffers()]
    placed = module if all(item.is_meta for item in tensors) else copy_to_meta(module)
    return placed.to("meta")  # moves nothing, but Lightning modules record their device


def copy_to_meta(module: nn.Module) -> nn.Module:
    """Return a copy of the module on the meta device; no value is copied, and nothing is shared."""
    memo: dict[int, Any] = {}
    for part in module.modules():
        for item in (*part._parameters.values(), *part._buffers.values(), *vars(part).values()):
            if isinstance(item, Tensor):
                memo[id(item)] = _meta_tensor(item)
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:  # user classes may raise anything
        raise UserError(
            f"expected a module that can be copied, found {type(module).__name__} with {error}: "
            "build it on the meta device, or pass a function that builds it"
        ) from error


def _meta_tensor(item: Tensor) -> Tensor:
    if nn.parameter.is_lazy(item):
        raise UserError("expected a module whose shapes are known, found a lazy one: run a batch through it first")
    empty = torch.empty_like(item, device="meta", requires_grad=False)
    return nn.Parameter(empty, item.requires_grad) if isinstance(item, nn.Parameter) else empty


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move each parameter to the meta device as soon as its module registers it; real memory is freed at once."""
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        is_real = isinstance(param, nn.Parameter) and not param.is_meta
        original(self, name, _meta_tensor(param) if is_real else param)  # type: ignore[arg-type]

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


_MAX_REAL = 2**24
"""Elements up to which constructors get real tensors: none needs the values of a larger one."""


class _LargeOnMeta(TorchFunctionMode):
    """Creates large tensors on the meta device and small ones as requested."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _device_constructors() and kwargs.get("device") is None and _elements(args, kwargs) > _MAX_REAL:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _elements(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the elements of the shape passed to a function like torch.empty, as a sequence or as arguments."""
    sizes = kwargs.get("size", args[0] if args and isinstance(args[0], tuple | list) else args)
    return prod(size for size in sizes if isinstance(size, int)) if isinstance(sizes, tuple | list) else 0


def _is_cuda(value: Any) -> bool:
    return (isinstance(value, str) and value.startswith("cuda")) or (
        isinstance(value, torch.device) and value.type == "cuda"
    )


_DRAWS = frozenset({Tensor.normal_, Tensor.uniform_, Tensor.random_, Tensor.bernoulli_, Tensor.erfinv_})
"""Initialise weights. Their meta functions are decompositions, which import torch's compiler."""


class _NoCuda(TorchFunctionMode):
    """Sends tensors to the meta device where the code sends them to CUDA, and draws no weights there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DRAWS and args[0].is_meta:
            return args[0]
        if func is Tensor.cuda:
            return args[0].to("meta")
        if any(map(_is_cuda, args)) or _is_cuda(kwargs.get("device")):
            args = tuple("meta" if _is_cuda(item) else item for item in args)
            kwargs = {name: "meta" if _is_cuda(value) else value for name, value in kwargs.items()}
        return func(*args, **kwargs)
