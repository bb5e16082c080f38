"""From a network's output to a loss, where the user gives no training step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name that every PyTorch reader knows
from torch.utils._pytree import tree_leaves

from vramcast.errors import UserError
from vramcast.jobs.batches import call
from vramcast.virtual_gpu.training.step import loss_of

TrainingStep = Callable[[nn.Module, Any], Tensor]
"""Runs a network on a batch and returns the loss."""


@dataclass(frozen=True)
class Loss:
    """A loss, and the output that lives as long as it in the usual training loop."""

    loss: Tensor
    output: Any = None


class BatchCall(nn.Module):
    """A network that takes a whole batch as one argument."""

    def __init__(self, subject: nn.Module) -> None:
        super().__init__()
        self.subject = subject

    def forward(self, batch: Any) -> Any:
        """Pass the batch on as the network takes it."""
        return call(self.subject, batch)


class LossCall(nn.Module):
    """A network that takes a whole batch and returns its loss, by the user's step or by `suggested_loss`."""

    def __init__(self, subject: nn.Module, step: TrainingStep | None) -> None:
        super().__init__()
        self.subject = subject
        self.step = step

    def forward(self, batch: Any) -> Loss:
        """Run the step up to the loss."""
        if self.step is None:
            output = call(self.subject, batch)
            return Loss(suggested_loss(output, batch), output)
        loss: Any = self.step(self.subject, batch)
        if isinstance(loss, Mapping):  # Lightning accepts a mapping with the key "loss"
            loss = loss.get("loss")
        if not isinstance(loss, Tensor) or loss.dim():
            raise UserError(f"expected a training step that returns a scalar loss, found {_described(loss)}: fix it")
        return Loss(loss)


def trainer_step(network: nn.Module, batch: Any) -> Tensor:
    """Return the network's own loss as the Trainer of transformers does, which frees the output before the backward."""
    return suggested_loss(call(network, batch), batch)


def builtin_loss(output: Any, batch: Any) -> str | None:
    """Return the name of the loss in the built-in step that suits an output, or None."""
    if not isinstance(output, Tensor) or isinstance(batch, Mapping) or not output.is_floating_point():
        return None
    if not all(isinstance(item, Tensor) for item in (batch if isinstance(batch, tuple | list) else [batch])):
        return None
    if output.dim() == 1 or output.shape == tree_leaves(batch)[0].shape:
        return "mse"
    return "cross_entropy" if output.dim() in (2, 3) else None


def suggested_loss(output: Any, batch: Any) -> Tensor:
    """Return the network's own loss, else the usual one for logits, maps and reconstructions, else a mean."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    output = logits if isinstance(logits, Tensor) else output
    if isinstance(output, Tensor) and output.is_floating_point():
        return _tensor_loss(output, batch)
    floating = [item for item in _tensors(output) if item.is_floating_point() and item.requires_grad]
    if not floating:
        raise UserError(
            f"expected a network whose output has a gradient, found {_described(output)}: give a step with --step"
        )
    return torch.stack([item.float().mean() for item in floating]).sum()


def _tensor_loss(output: Tensor, batch: Any) -> Tensor:
    if not output.dim():
        return output
    if output.dim() == 1 or any(output.shape == item.shape for item in _tensors(batch)):
        return loss_of("mse", output)
    if output.dim() < 4:
        return loss_of("cross_entropy", output)
    # a map of classes, channels first as F.cross_entropy takes it
    targets = torch.randint(output.shape[1], (output.shape[0], *output.shape[2:]), device=output.device)
    return F.cross_entropy(output, targets)


def _tensors(value: Any) -> list[Tensor]:
    plain = dict(value) if isinstance(value, Mapping) else value  # outputs of transformers are mappings
    return [item for item in tree_leaves(plain) if isinstance(item, Tensor)]


def _described(value: Any) -> str:
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    return f"{type(value).__name__}{shape}"
