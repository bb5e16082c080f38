"""Keras 3 networks on the torch backend: modules that choose their device themselves, so that meta tensors fail."""

from typing import Any

import torch
from torch import Tensor, nn

from vramcast.jobs.batches import call
from vramcast.jobs.steps import suggested_loss


def keras_step(module: nn.Module, batch: Any) -> Tensor:
    """Run a network in training mode, which is an argument of the call in Keras, and return the usual loss."""
    output = call(_Training(module), batch)
    return suggested_loss(output, batch)


def keras_input(module: nn.Module) -> tuple[int, ...] | None:
    """Return the shape of the only input without the batch, None if it is not known."""
    shape = getattr(module, "input_shape", None)
    if isinstance(shape, tuple) and len(shape) > 1 and all(isinstance(size, int) for size in shape[1:]):
        return shape[1:]
    return None


def build_variables(module: nn.Module, batch: Any) -> None:
    """Run a network once if it makes its weights at its first call."""
    if not getattr(module, "built", True) or not list(module.parameters()):
        with torch.no_grad():
            call(module, batch)


class _Training(nn.Module):
    def __init__(self, subject: nn.Module) -> None:
        super().__init__()
        self.subject = subject

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network with training=True, if it knows that argument."""
        if getattr(self.subject, "_call_has_training_arg", True):
            kwargs["training"] = True
        return self.subject(*args, **kwargs)
