"""State sizes and argument rules of the optimizers in torch.optim.

State sizes follow the `step` methods of the classes; `tests/test_static.py` compares them with the real ones.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from vramcast.virtual_gpu.training.setup import TrainingSetup, parse_call

Shape = Sequence[int]
_SHARED = frozenset({"lr", "weight_decay", "maximize"})
_STEP_ELEMENTS = 1  # fused and capturable implementations keep the step count of each parameter on the device


@dataclass(frozen=True)
class OptimizerRule:
    """One class of torch.optim: its state per parameter, its arguments, its implementations."""

    state: Callable[[Shape, Mapping[str, Any]], int]
    arguments: frozenset[str]
    fused: bool = False
    keeps_step: bool = True
    by_shape: bool = False
    """True if the state of a parameter depends on its shape, not on the number of its elements alone."""
    demands: Mapping[str, str] = field(default_factory=dict)
    """Conditions of the class on its arguments that replace those in `DEMANDS`, by argument."""

    @property
    def implementations(self) -> tuple[str, ...]:
        """The implementations that a spec may name."""
        return ("default", "foreach", "fused", "single") if self.fused else ("default", "foreach", "single")


def _copies(count: int) -> Callable[[Shape, Mapping[str, Any]], int]:
    return lambda shape, args: count * prod(shape)


def _sgd(shape: Shape, args: Mapping[str, Any]) -> int:
    return prod(shape) if args.get("momentum") else 0


def _adam(shape: Shape, args: Mapping[str, Any]) -> int:
    return (3 if args.get("amsgrad") else 2) * prod(shape)


def _rmsprop(shape: Shape, args: Mapping[str, Any]) -> int:
    return (1 + bool(args.get("momentum")) + bool(args.get("centered"))) * prod(shape)


def _asgd(shape: Shape, args: Mapping[str, Any]) -> int:
    """Count the average and three scalars that other classes keep on the CPU: step, eta and mu."""
    return prod(shape) + 3


def _adafactor(shape: Shape, args: Mapping[str, Any]) -> int:
    """Count a row and a column of second moments for a matrix, all of them for a vector."""
    if len(shape) < 2:
        return prod(shape)
    return prod(shape) // shape[-1] + prod(shape) // shape[-2]


# Checks of the constructors on the arguments that a spec sets: https://github.com/pytorch/pytorch torch/optim/*.py
DEMANDS: Mapping[str, str] = {
    "lr": "lr >= 0",
    "weight_decay": "weight_decay >= 0",
    "momentum": "momentum >= 0",
    "eps": "eps >= 0",
    "betas": "len(betas) == 2 and all(0 <= beta < 1 for beta in betas)",
    "rho": "0 <= rho <= 1",
    "lr_decay": "lr_decay >= 0",
    "initial_accumulator_value": "initial_accumulator_value >= 0",
    "beta2_decay": "beta2_decay <= 0",
    "d": "d >= 1",
    "momentum_decay": "momentum_decay >= 0",
    "etas": "len(etas) == 2 and 0 < etas[0] < 1 < etas[1]",
    "step_sizes": "len(step_sizes) == 2",
}
_ADAM = _SHARED | {"betas", "eps", "amsgrad"}
_ADAM_DEMANDS = {"betas": "len(betas) == 2 and all(is_float(beta) and 0 <= beta < 1 for beta in betas)"}
OPTIMIZERS: Mapping[str, OptimizerRule] = {
    "SGD": OptimizerRule(
        _sgd,
        _SHARED | {"momentum", "dampening", "nesterov"},
        fused=True,
        keeps_step=False,
        demands={"nesterov": "not nesterov or (momentum > 0 and dampening == 0)"},
    ),
    "Adam": OptimizerRule(_adam, _ADAM, fused=True, demands=_ADAM_DEMANDS),
    "AdamW": OptimizerRule(_adam, _ADAM, fused=True, demands=_ADAM_DEMANDS),
    "RMSprop": OptimizerRule(
        _rmsprop, _SHARED | {"alpha", "eps", "momentum", "centered"}, demands={"alpha": "alpha >= 0"}
    ),
    "Adagrad": OptimizerRule(_copies(1), _SHARED | {"lr_decay", "initial_accumulator_value", "eps"}, fused=True),
    "Adadelta": OptimizerRule(_copies(2), _SHARED | {"rho", "eps"}),
    "Adafactor": OptimizerRule(
        _adafactor,
        _SHARED | {"beta2_decay", "eps", "d"},
        by_shape=True,
        demands={"eps": "len(eps) == 2 and (eps[0] is None or eps[0] >= 0) and eps[1] >= 0"},
    ),
    "Adamax": OptimizerRule(_copies(2), _SHARED | {"betas", "eps"}),
    "NAdam": OptimizerRule(_copies(2), _SHARED | {"betas", "eps", "momentum_decay", "decoupled_weight_decay"}),
    "RAdam": OptimizerRule(_copies(2), _SHARED | {"betas", "eps", "decoupled_weight_decay"}),
    "Rprop": OptimizerRule(_copies(2), frozenset({"lr", "etas", "step_sizes", "maximize"})),
    "ASGD": OptimizerRule(_asgd, _SHARED | {"lambd", "alpha", "t0"}, by_shape=True),
}
REFUSED: Mapping[str, str] = {
    "LBFGS": "LBFGS runs the training step several times per step, which a spec cannot describe",
    "Muon": "Muon takes matrices only, and these networks have biases",
    "SparseAdam": "SparseAdam takes sparse gradients only, and these networks have dense ones",
}


def state_elements(training: TrainingSetup, shapes: Sequence[Shape]) -> int:
    """Return the elements of optimizer state on the device for parameters of these shapes."""
    name, args = parse_call(training.optimizer)
    rule = OPTIMIZERS[name]
    on_device = training.implementation == "fused" or bool(args.get("capturable"))
    steps = _STEP_ELEMENTS * len(shapes) if rule.keeps_step and on_device else 0
    if not rule.by_shape:
        return steps + rule.state((sum(map(prod, shapes)),), args)
    return steps + sum(rule.state(shape, args) for shape in shapes)
