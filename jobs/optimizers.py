"""Optimizers by name or as objects: those of torch.optim, and those of bitsandbytes and torchao."""

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vramcast.errors import UserError, suggestion
from vramcast.jobs.analysis.optimizers import OPTIMIZERS, REFUSED
from vramcast.jobs.finetuning.low_bit_optimizers import FORMS, SYNONYMS, low_bit_factory
from vramcast.virtual_gpu.tracing.uncompiled import without_compiler
from vramcast.virtual_gpu.training.loop import MakeOptimizer
from vramcast.virtual_gpu.training.setup import call_text, parse_call

OWN = "Own"
"""Stands for an optimizer that comes with the network, such as Lightning's configure_optimizers."""
DEFAULT = "AdamW"
_LOW_BIT_ARGUMENTS = {"lr", "betas", "eps", "weight_decay", "momentum", "alpha"}
SPARSE = "SparseAdam"
"""A user's network may have embeddings with sparse gradients alone, unlike those of specs."""
OptimizerOf = Callable[[nn.Module], torch.optim.Optimizer]


def parse_optimizer(text: str) -> str:
    """Return an optimizer call in canonical case: 'sgd(momentum=0.9)' becomes 'SGD(momentum=0.9)'.

    Names of the Trainer of transformers, such as 'paged_adamw_8bit', are accepted, too.
    """
    name, bracket, rest = text.strip().partition("(")
    if not bracket and name.lower() in SYNONYMS:
        name, bracket, rest = SYNONYMS[name.lower()].partition("(")
    names = {item.lower(): item for item in (*OPTIMIZERS, *FORMS, *REFUSED, OWN)}
    canonical = names.get(SYNONYMS.get(name.lower(), name).lower())
    if canonical is None:
        choices = sorted([*OPTIMIZERS, *FORMS, *SYNONYMS])
        hint = suggestion(name, choices, "name one of them")
        raise UserError(f"expected an optimizer of {choices}, found {text!r}: {hint}")
    if canonical in REFUSED and canonical != SPARSE:
        raise UserError(
            f"expected an optimizer whose step can be simulated, found {canonical}: {REFUSED[canonical]}; name another"
        )
    call = canonical + bracket + rest
    arguments = {} if canonical == OWN else parse_call(call)[1]
    if arguments:
        _check_arguments(canonical, arguments)
    return call


def _check_arguments(name: str, arguments: Mapping[str, Any]) -> None:
    """Raise unless the class takes these arguments and accepts their values."""
    if name in FORMS:
        unknown = sorted(arguments.keys() - _LOW_BIT_ARGUMENTS)
        if unknown:
            raise UserError(
                f"expected arguments of {name} among {sorted(_LOW_BIT_ARGUMENTS)}, found {unknown}: remove them"
            )
        return
    cls: Any = getattr(torch.optim, name)
    parameters = inspect.signature(cls).parameters
    choices = sorted(parameters.keys() - {"params"})
    unknown = sorted(arguments.keys() - choices)
    if unknown:
        hint = suggestion(unknown[0], choices, "remove them")
        raise UserError(f"expected arguments of {name} among {choices}, found {unknown}: {hint}")
    if arguments.get("differentiable"):
        raise UserError(
            f"expected {name} without differentiable=True, found it: torch cannot step leaf parameters with it; drop it"
        )
    values = {key: value for key, value in arguments.items() if key != "fused"}  # fused refuses the CPU
    try:
        with without_compiler():
            cls([nn.Parameter(torch.empty(1))], **values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"expected arguments that {name} accepts, found: {error}; change them") from error


def factory_of(text: str, trainers: nn.Module | None = None) -> MakeOptimizer | None:
    """Return what makes an optimizer that torch.optim does not have, or None for a class of torch.optim.

    `trainers` is a network whose loop is the Trainer of transformers.
    """
    name, arguments = parse_call(text)
    return low_bit_factory(name, arguments, trainers) if name in FORMS else None


def is_low_bit(name: str) -> bool:
    """Return whether an optimizer is one of bitsandbytes or torchao, whose state is small or paged."""
    return name in FORMS


def optimizer_facts(text: str) -> tuple[str, ...]:
    """Return what an answer must state about an optimizer."""
    form = FORMS.get(parse_call(text)[0])
    paged = "states of a paged optimizer are in managed memory, not on the device: they need room on the host"
    return (paged,) if form and form.paged else ()


def describe_optimizer(optimizer: Any, module: nn.Module) -> tuple[str, OptimizerOf | None]:
    """Return the text of an optimizer, and a function that makes it for a copy of the module if text cannot.

    Accepts a text, an optimizer object of the module's parameters, a class, a partial of a class, or a function of
    parameters. Objects keep their class, their arguments and their parameter groups.
    """
    if isinstance(optimizer, str):
        return optimizer, None
    if isinstance(optimizer, torch.optim.Optimizer):
        cls, arguments = type(optimizer), _constructor_arguments(optimizer)
        groups = _named_groups(optimizer, module)
        if len(groups) == 1 and len(groups[0]["params"]) == sum(item.requires_grad for item in module.parameters()):
            text = _text_of(cls, arguments)
            return (text, None) if text else (OWN, partial(_remade, cls, arguments, groups))
        return OWN, partial(_remade, cls, _as_on_cuda(cls, arguments), groups)
    if isinstance(optimizer, partial) and isinstance(optimizer.func, type) and not optimizer.args:
        text = _text_of(optimizer.func, optimizer.keywords)
    else:
        text = _text_of(optimizer, {}) if isinstance(optimizer, type) else None
    if text:
        return text, None
    if not callable(optimizer):
        raise UserError(f"expected an optimizer's name, object or class, found {optimizer!r}: give one of these")
    return OWN, lambda copy: optimizer([item for item in copy.parameters() if item.requires_grad])


def _constructor_arguments(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    names = inspect.signature(type(optimizer)).parameters
    return {key: value for key, value in optimizer.defaults.items() if key in names}


def _text_of(cls: type, arguments: Mapping[str, Any]) -> str | None:
    """Return a call of torch.optim with the arguments that differ from their defaults; None for other classes."""
    if getattr(torch.optim, cls.__name__, None) is not cls or cls.__name__ not in OPTIMIZERS:
        return None
    defaults = {name: item.default for name, item in inspect.signature(cls).parameters.items()}
    changed = {name: value for name, value in arguments.items() if not _is_same(value, defaults.get(name))}
    literals = {name: value for name, value in changed.items() if _is_literal(value)}
    return call_text(cls.__name__, literals)


def _is_same(value: Any, default: Any) -> bool:
    return not isinstance(value, Tensor) and value == default


def _is_literal(value: Any) -> bool:
    """Return whether a value can be written in a call; a learning rate may be a tensor, which decides no memory."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False


def _named_groups(optimizer: torch.optim.Optimizer, module: nn.Module) -> list[dict[str, Any]]:
    """Return the parameter groups with names in the place of parameters."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        missing = [item for item in group["params"] if id(item) not in names]
        if missing:
            raise UserError(
                f"expected an optimizer of the module's own parameters, found {len(missing)} that are not in the "
                "module: make it from module.parameters()"
            )
        groups.append({**group, "params": [names[id(item)] for item in group["params"]]})
    return groups


def _remade(
    cls: type[torch.optim.Optimizer], arguments: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], copy: nn.Module
) -> torch.optim.Optimizer:
    parameters = dict(copy.named_parameters())
    named = [{**group, **arguments, "params": [parameters[name] for name in group["params"]]} for group in groups]
    return cls(named, **arguments)


def _as_on_cuda(cls: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Choose the foreach form, as torch does on CUDA (torch/optim/optimizer.py, _default_to_fused_or_foreach)."""
    undecided = "foreach" in arguments and arguments["foreach"] is None and not arguments.get("fused")
    return {**arguments, "foreach": True} if undecided and cls.__name__ != "Adafactor" else dict(arguments)


def stand_in(state_bytes: int, trainable_bytes: int) -> str:
    """Return the optimizer of torch.optim with about as much state, for estimators that do not know the real one."""
    copies = round(state_bytes / max(trainable_bytes, 1))
    return ("SGD", "SGD(momentum=0.9)", "Adam", "Adam(amsgrad=True)")[min(copies, 3)]


def single_optimizer(configured: Any) -> torch.optim.Optimizer:
    """Return the one optimizer in a return value of Lightning's configure_optimizers."""
    value = configured
    while not isinstance(value, torch.optim.Optimizer):
        if isinstance(value, Mapping) and "optimizer" in value:
            value = value["optimizer"]
        elif isinstance(value, Sequence) and value and not isinstance(value, str):
            if isinstance(value[0], torch.optim.Optimizer) and len(value) > 1 and not _are_schedulers(value[1:]):
                raise UserError(
                    "expected one optimizer from configure_optimizers, found several: give the step of one with --step"
                )
            value = value[0]
        else:
            raise UserError(
                f"expected an optimizer from configure_optimizers, found {type(value).__name__}: give --optimizer NAME"
            )
    return value


def _are_schedulers(rest: Sequence[Any]) -> bool:
    return not any(isinstance(item, torch.optim.Optimizer) for item in rest)
