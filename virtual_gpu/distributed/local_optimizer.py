"""Optimizers of sharded parameters on their local shards.

An elementwise update of a DTensor is the same update of its local shard, with the same temporaries. DTensor's
bookkeeping is left out, which takes longer than the rest of a traced step: it is quadratic in the number of parameters.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from vramcast.virtual_gpu.distributed.rank_tracer import local_tensor

ELEMENTWISE = frozenset(
    {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
"""Optimizers of torch.optim that update each element by itself."""


class LocalOptimizer:
    """An optimizer of the local shards of parameters, in place of one of the parameters themselves."""

    def __init__(
        self, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], parameters: Sequence[nn.Parameter]
    ) -> None:
        self.parameters = list(parameters)
        self.shards = [nn.Parameter(local_tensor(item.detach())) for item in parameters]
        self.optimizer = make(self.shards)

    def zero_grad(self) -> None:
        """Delete the gradients."""
        for item in (*self.parameters, *self.shards):
            item.grad = None

    def step(self) -> None:
        """Update the shards."""
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            shard.grad = None if parameter.grad is None else local_tensor(parameter.grad.detach())
        self.optimizer.step()
        for shard in self.shards:
            shard.grad = None

    @property
    def state(self) -> dict[Any, Any]:
        """Return the state by parameter."""
        pairs = zip(self.parameters, self.shards, strict=True)
        return {parameter: self.optimizer.state[shard] for parameter, shard in pairs if shard in self.optimizer.state}
