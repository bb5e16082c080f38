"""The memory of an optimizer's step: its state, and temporaries over all parameters or one after another."""

from collections.abc import Sequence
from math import prod

from vramcast.jobs.analysis.optimizers import OPTIMIZERS
from vramcast.jobs.analysis.schedule.parameters import Shape
from vramcast.virtual_gpu.training.setup import DTYPE_BYTES, TrainingSetup, parse_call

_COPIES = {"SGD": 0, "Adagrad": 2, "Adadelta": 2}
"""Temporaries of a step, in copies of the parameters; 1 for other optimizers (torch/optim)."""
_DECAY_IN_PLACE = frozenset({"Adam", "AdamW", "NAdam", "RAdam"})
"""Optimizers whose weight decay needs no copy beside their other temporaries."""


def state_blocks(training: TrainingSetup, shapes: Sequence[Shape]) -> list[int]:
    """Return the sizes of the optimizer's state."""
    name, arguments = parse_call(training.optimizer)
    rule, size, blocks = OPTIMIZERS.get(name), DTYPE_BYTES[training.dtype], []
    for shape in shapes if rule else ():
        elements = prod(shape)
        whole, rest = divmod(rule.state(shape, arguments), max(elements, 1)) if rule else (0, 0)
        blocks += [elements * size] * whole + ([rest * size] if rest else [])
    return blocks


def temporary_blocks(training: TrainingSetup, shapes: Sequence[Shape]) -> tuple[list[int], bool]:
    """Return the sizes of temporaries, and whether all of them are there together."""
    name, arguments = parse_call(training.optimizer)
    if name not in OPTIMIZERS or training.implementation == "fused":
        return [], True
    copies = _COPIES.get(name, 1) + (bool(arguments.get("weight_decay")) and name not in _DECAY_IN_PLACE)
    together = training.implementation in ("default", "foreach") and name != "Adafactor"
    return [prod(shape) * DTYPE_BYTES[training.dtype] for _ in range(copies) for shape in shapes], together
