"""The optimizer in the backward pass: a parameter is updated as soon as its gradient is there, which is then freed."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn


class OptimizerInBackward(torch.optim.Optimizer):
    """One optimizer for each parameter, stepped by a hook on its gradient; the step of the whole does nothing."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    ) -> None:
        super().__init__(parameters, {})
        self.parts = {parameter: make([parameter]) for parameter in parameters}
        for parameter, part in self.parts.items():
            part.state = self.state
            hooked: Any = parameter
            hooked.register_post_accumulate_grad_hook(partial(_update, part))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: the backward pass has updated everything."""

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Call a hook before each update."""
        return [part.register_step_pre_hook(hook) for part in self.parts.values()][-1]

    def register_step_post_hook(self, hook: Any) -> Any:
        """Call a hook after each update."""
        return [part.register_step_post_hook(hook) for part in self.parts.values()][-1]


def _update(part: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
    part.step()
    parameter.grad = None
