"""Optimizers by the names that people type, and those that torch.optim does not have."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vramcast.dataset_builder.analysis.optimizers import OPTIMIZERS, REFUSED
from vramcast.errors import UserError
from vramcast.virtual_gpu.session import MakeOptimizer
from vramcast.virtual_gpu.training_setup import parse_call

OWN = "Own"
"""The optimizer that a network brings along (Lightning's configure_optimizers)."""
DEFAULT = "AdamW"
_BLOCK = 256  # elements that share a scale (bitsandbytes/optim/optimizer.py, block-wise quantisation)
_LEAST = 4096  # smaller tensors keep 32 bits (bitsandbytes/optim/optimizer.py, min_8bit_size)


class Adam8bit(torch.optim.Optimizer):
    """Adam with two moments of a byte each, as bitsandbytes keeps them: for their memory, not for training."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-3, betas: Any = None, eps: float = 1e-8,
                 weight_decay: float = 0.0) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make the state at the first step; one kernel then updates in place, without temporaries."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter] = dict(_moments(parameter))


def _moments(parameter: Tensor) -> Iterable[tuple[str, Tensor]]:
    small = parameter.numel() < _LEAST
    for index in (1, 2):
        yield f"state{index}", torch.zeros_like(parameter, dtype=torch.float32 if small else torch.uint8)
        if not small:
            yield f"absmax{index}", torch.zeros(-(-parameter.numel() // _BLOCK), device=parameter.device)


_OTHERS: Mapping[str, type[torch.optim.Optimizer]] = {"Adam8bit": Adam8bit, "AdamW8bit": Adam8bit}


def optimizer_named(text: str) -> str:
    """An optimizer in whatever case, with its arguments: 'sgd(momentum=0.9)' is 'SGD(momentum=0.9)'."""
    name, bracket, rest = text.strip().partition("(")
    known = {item.lower(): item for item in (*OPTIMIZERS, *_OTHERS, *REFUSED, OWN)}
    found = known.get(name.lower())
    if found is None:
        choices = sorted([*OPTIMIZERS, *_OTHERS])
        raise UserError(f"expected an optimizer of {choices}, found {text!r}: name one of them")
    if found in REFUSED:
        raise UserError(f"expected an optimizer that a step can be simulated with, found {found}: {REFUSED[found]}")
    call = found + bracket + rest
    _check_arguments(found, parse_call(call)[1])
    return call


def _check_arguments(name: str, arguments: Mapping[str, Any]) -> None:
    cls: Any = _OTHERS.get(name) or getattr(torch.optim, name, None)
    known = inspect.signature(cls).parameters if cls else {}
    unknown = sorted(arguments.keys() - known)
    if unknown:
        raise UserError(f"expected arguments of {name} among {sorted(known)}, found {unknown}: remove them")


def made_by(text: str) -> MakeOptimizer | None:
    """How an optimizer is made that the builder's own step does not know; None for those that it does."""
    name, arguments = parse_call(text)
    return partial(_OTHERS[name], **arguments) if name in _OTHERS else None


def stand_in(state_bytes: int, trainable_bytes: int) -> str:
    """The optimizer of torch.optim that keeps about as much: what an estimator takes an unknown one for."""
    copies = round(state_bytes / max(trainable_bytes, 1))
    return ("SGD", "SGD(momentum=0.9)", "Adam", "Adam(amsgrad=True)")[min(copies, 3)]


def optimizer_of(configured: Any) -> torch.optim.Optimizer:
    """The one optimizer in what Lightning's configure_optimizers may return."""
    found = configured
    while not isinstance(found, torch.optim.Optimizer):
        if isinstance(found, Mapping) and "optimizer" in found:
            found = found["optimizer"]
        elif isinstance(found, Sequence) and found and not isinstance(found, str):
            if isinstance(found[0], torch.optim.Optimizer) and len(found) > 1 and not _are_schedulers(found[1:]):
                raise UserError(
                    "expected one optimizer from configure_optimizers, found several: give the step of one with --step"
                )
            found = found[0]
        else:
            raise UserError(
                f"expected an optimizer from configure_optimizers, found {type(found).__name__}: give --optimizer NAME"
            )
    return found


def _are_schedulers(rest: Sequence[Any]) -> bool:
    return not any(isinstance(item, torch.optim.Optimizer) for item in rest)
