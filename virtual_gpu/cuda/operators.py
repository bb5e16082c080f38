"""Facts about an operator, read once from its schema."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_UNINITIALISED = frozenset({"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty",
                            "aten::new_empty_strided", "aten::empty_permuted"})  # fmt: skip
_LISTS = ("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_")


@dataclass(frozen=True)
class Operator:
    """What a run needs to know of an operator."""

    written: tuple[int, ...]
    """Positions of the arguments that it writes to."""
    written_names: tuple[str, ...]
    """Names of the keyword arguments that it writes to."""
    is_random: bool
    takes_generator: bool
    is_uninitialised: bool
    """It makes tensors whose values are arbitrary."""
    is_list: bool
    """It works on lists of tensors: optimizers and gradient scaling."""
    has_dynamic_shape: bool
    is_composite: bool
    """It is written in terms of other operators, derivative included."""


@cache
def operator_of(func: Any) -> Operator:
    """Return the facts about an overload of an operator."""
    schema = func._schema
    written = [item.alias_info is not None and item.alias_info.is_write for item in schema.arguments]
    names = tuple(item.name for item, writes in zip(schema.arguments, written, strict=True) if writes)
    return Operator(
        written=tuple(index for index, writes in enumerate(written) if writes),
        written_names=names,
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
        takes_generator=any(item.name == "generator" for item in schema.arguments),
        is_uninitialised=schema.name in _UNINITIALISED,
        is_list=schema.name.startswith(_LISTS),
        has_dynamic_shape=torch.Tag.dynamic_output_shape in func.tags,
        is_composite=_is_composite(func),
    )


def _is_composite(func: Any) -> bool:
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    except RuntimeError:  # an operator of TorchScript alone, such as prim::device
        return False


def tensors_in(args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors among arguments and in their lists."""
    tensors: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += [item for item in value if isinstance(item, Tensor)]
    return tensors


def written_tensors(operator: Operator, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that a call writes to."""
    values = [args[index] for index in operator.written if index < len(args)]
    values += [kwargs[name] for name in operator.written_names if name in kwargs]
    return tensors_in(values, {})


def map_tensors(function: Any, value: Any) -> Any:
    """Apply a function to each tensor of an argument, a list of arguments or a result."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        items = [map_tensors(function, item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {name: map_tensors(function, item) for name, item in value.items()}
    return value
