"""Values of which only a part is known, by three-valued logic: `unknown | True` is true, `unknown & False` is false.

A tensor of truth values or whole numbers has a mask beside its values, which is True where they are known. A rule for
an operator computes both. Sampled tokens are unknown, for example, but a sequence that has its greatest length is done.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vramcast.virtual_gpu.cuda.operators import aten

Part = tuple[Tensor, Tensor]
"""Values, and a mask of those that are known."""
Rule = Callable[..., Part | None]


def part_of(value: Any) -> Part:
    """Return a number as a part that is known."""
    tensor = torch.as_tensor(value)
    return tensor, torch.ones(tensor.shape, dtype=torch.bool)


def unknown(like: Tensor) -> Part:
    """Return a part of which nothing is known."""
    return torch.zeros(like.shape, dtype=like.dtype), torch.zeros(like.shape, dtype=torch.bool)


def rule_for(func: Any) -> Rule | None:
    """Return the rule of an operator, None if it has none."""
    return _RULES.get(func)


def _both(func: Any) -> Rule:
    """Return a rule for a result that is known where both numbers are."""

    def run(*args: Any, **kwargs: Any) -> Part | None:
        parts = [item if isinstance(item, tuple) else part_of(item) for item in args]
        values = [item[0] if isinstance(item, tuple) else item for item in args]
        mask = parts[0][1]
        for _, other in parts[1:]:
            mask = mask & other
        out = func(*values, **kwargs)
        return out, mask.expand(out.shape).clone() if mask.shape != out.shape else mask

    return run


def _decided(func: Any, decides: Callable[[Tensor], Tensor]) -> Rule:
    """Return a rule for a result that is known where both numbers are, or where one of them decides it."""

    def run(one: Any, other: Any) -> Part | None:
        first, second = (item if isinstance(item, tuple) else part_of(item) for item in (one, other))
        if func is torch.logical_or and not first[0].dtype == second[0].dtype == torch.bool:
            return None  # of numbers it joins bits
        mask = (first[1] & second[1]) | (first[1] & decides(first[0])) | (second[1] & decides(second[0]))
        return func(first[0], second[0]), mask

    return run


def _where(condition: Part, one: Any, other: Any) -> Part:
    """Choose numbers: one is known if its condition is, or if both are equal."""
    first, second = (item if isinstance(item, tuple) else part_of(item) for item in (one, other))
    mask = (condition[1] & torch.where(condition[0].bool(), first[1], second[1])) | (
        first[1] & second[1] & (first[0] == second[0])
    )
    return torch.where(condition[0].bool(), first[0], second[0]), mask


def _filled(values: Part, chosen: Part, value: Any) -> Part:
    number = value if isinstance(value, tuple) else part_of(torch.as_tensor(value).to(values[0].dtype))
    return _where(chosen, number, values)


def _moved(func: Any) -> Rule:
    """Return a rule for values that only change their places: masks follow them."""

    def run(first: Any, *args: Any, **kwargs: Any) -> Part | None:
        others = [item[0] if isinstance(item, tuple) else item for item in args]
        if any(isinstance(item, tuple) and not bool(item[1].all()) for item in args):
            return None
        mask_kwargs = {name: value for name, value in kwargs.items() if name not in ("dtype", "memory_format")}
        return func(first[0], *others, **kwargs), func(first[1], *others, **mask_kwargs)

    return run


def _joined(func: Any) -> Rule:
    def run(parts: Any, *args: Any) -> Part:
        return func([item[0] for item in parts], *args), func([item[1] for item in parts], *args)

    return run


def _some(func: Any) -> Rule:
    """Return a rule for `any`: true where one value is known to be, and false where all are known."""

    def run(part: Part, *args: Any) -> Part:
        values, mask = part
        sure = func(values.bool() & mask, *args)
        return sure, sure | aten.logical_not(func(~mask, *args))

    return run


def _every(func: Any, some: Any) -> Rule:
    """Return a rule for `all`: false where one value is known to be, and true where all are known."""

    def run(part: Part, *args: Any) -> Part:
        values, mask = part
        refuted = some(~values.bool() & mask, *args)
        return ~refuted & func(mask, *args), refuted | func(mask, *args)

    return run


def _reduced(func: Any, every: Any) -> Rule:
    """Return a rule for a sum or a maximum: known where all of its numbers are."""

    def run(part: Part, *args: Any, **kwargs: Any) -> Part:
        return func(part[0], *args, **kwargs), every(part[1], *args[:2])

    return run


def _member(elements: Part, others: Any, **kwargs: Any) -> Part | None:
    """Compare elements with some numbers: an answer is known if both are."""
    if isinstance(others, tuple) and not bool(others[1].all()):
        return None
    return torch.isin(elements[0], others[0] if isinstance(others, tuple) else others, **kwargs), elements[1]


def _copied(target: Part, source: Part, *_: Any) -> Part:
    values = source[0].to(target[0].dtype).expand(target[0].shape)
    return values, source[1].expand(target[0].shape)


def _converted(part: Part, **kwargs: Any) -> Part:
    return part[0].to(kwargs.get("dtype") or part[0].dtype), part[1]


_ELEMENTWISE = (
    aten.eq.Tensor, aten.eq.Scalar, aten.ne.Tensor, aten.ne.Scalar, aten.lt.Tensor, aten.lt.Scalar, aten.le.Tensor,
    aten.le.Scalar, aten.gt.Tensor, aten.gt.Scalar, aten.ge.Tensor, aten.ge.Scalar, aten.add.Tensor, aten.sub.Tensor,
    aten.rsub.Scalar, aten.rsub.Tensor, aten.bitwise_not.default, aten.logical_not.default,
    aten.bitwise_xor.Tensor, aten.logical_xor.default, aten.neg.default, aten.minimum.default, aten.maximum.default,
    aten.remainder.Scalar, aten.clamp.default,
)  # fmt: skip
_MOVES = (
    aten.clone.default, aten.index_select.default, aten.gather.default, aten.flip.default, aten.roll.default,
    aten.repeat.default, aten.constant_pad_nd.default,
)  # fmt: skip


def _is_true(value: Tensor) -> Tensor:
    return value.bool()


def _is_zero(value: Tensor) -> Tensor:
    return value == 0


_RULES: dict[Any, Rule] = {
    **{func: _both(func) for func in _ELEMENTWISE},
    **{func: _moved(func) for func in _MOVES},
    **{func: _joined(func) for func in (aten.cat.default, aten.stack.default)},
    **{func: _some(func) for func in (aten.any.default, aten.any.dim, aten.any.dims)},
    aten.all.default: _every(aten.all.default, aten.any.default),
    aten.all.dim: _every(aten.all.dim, aten.any.dim),
    aten.all.dims: _every(aten.all.dims, aten.any.dims),
    aten.max.default: _reduced(aten.max.default, aten.all.default),
    aten.min.default: _reduced(aten.min.default, aten.all.default),
    aten.amax.default: _reduced(aten.amax.default, aten.all.dims),
    aten.sum.default: _reduced(aten.sum.default, aten.all.default),
    aten.sum.dim_IntList: _reduced(aten.sum.dim_IntList, aten.all.dims),
    aten.where.self: _where,
    aten.isin.Tensor_Tensor: _member,
    aten.isin.Tensor_Scalar: _member,
    aten.masked_fill.Scalar: _filled,
    aten.masked_fill.Tensor: _filled,
    aten._to_copy.default: _converted,
    aten.bitwise_or.Tensor: _decided(torch.logical_or, _is_true),
    aten.logical_or.default: _decided(torch.logical_or, _is_true),
    aten.bitwise_and.Tensor: _decided(torch.bitwise_and, _is_zero),
    aten.logical_and.default: _decided(torch.logical_and, _is_zero),
    aten.mul.Tensor: _decided(torch.mul, _is_zero),
}
_IN_PLACE = {
    aten.bitwise_or_.Tensor: aten.bitwise_or.Tensor,
    aten.logical_or_.default: aten.logical_or.default,
    aten.bitwise_and_.Tensor: aten.bitwise_and.Tensor,
    aten.logical_and_.default: aten.logical_and.default,
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.add_.Tensor: aten.add.Tensor,
    aten.sub_.Tensor: aten.sub.Tensor,
    aten.masked_fill_.Scalar: aten.masked_fill.Scalar,
    aten.masked_fill_.Tensor: aten.masked_fill.Tensor,
    aten.logical_not_.default: aten.logical_not.default,
}
"""Operators that write to their first argument, and those that do not."""


def rule_in_place(func: Any) -> Rule | None:
    """Return the rule for the new values of the first argument of an operator in place."""
    return _copied if func is aten.copy_.default else _RULES.get(_IN_PLACE.get(func))
