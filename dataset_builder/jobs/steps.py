"""From a network's output to a loss, where nobody wrote a training step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name that every PyTorch reader knows
from torch.utils._pytree import tree_leaves

from vramcast.dataset_builder.jobs.batches import call
from vramcast.errors import UserError
from vramcast.virtual_gpu.training_step import loss_of

Step = Callable[[nn.Module, Any], Tensor]
"""One forward pass of a network on a batch, up to the loss."""


@dataclass(frozen=True)
class Loss:
    """A loss, and what lives as long as it in the usual loop."""

    loss: Tensor
    output: Any = None


class Called(nn.Module):
    """A network that is fed whole batches."""

    def __init__(self, subject: nn.Module) -> None:
        super().__init__()
        self.subject = subject

    def forward(self, batch: Any) -> Any:
        """Hand a batch over as the network takes it."""
        return call(self.subject, batch)


class Stepped(nn.Module):
    """A network that is fed whole batches and answers with its loss: by a step of its user's, or the one suggested."""

    def __init__(self, subject: nn.Module, step: Step | None) -> None:
        super().__init__()
        self.subject = subject
        self.step = step

    def forward(self, batch: Any) -> Loss:
        """A step up to the loss."""
        if self.step is None:
            output = call(self.subject, batch)
            return Loss(suggested_loss(output, batch), output)
        found: Any = self.step(self.subject, batch)
        if isinstance(found, Mapping):  # Lightning lets a step answer with more than its loss
            found = found.get("loss")
        if not isinstance(found, Tensor) or found.dim():
            raise UserError(f"expected a training step that returns a scalar loss, found {_described(found)}: mend it")
        return Loss(found)


def plain_loss(output: Any, batch: Any) -> str | None:
    """The name of the loss in the builder's own step, where that step will do."""
    if not isinstance(output, Tensor) or isinstance(batch, Mapping) or not output.is_floating_point():
        return None
    if not all(isinstance(item, Tensor) for item in (batch if isinstance(batch, tuple | list) else [batch])):
        return None
    if output.dim() == 1 or output.shape == tree_leaves(batch)[0].shape:
        return "mse"
    return "cross_entropy" if output.dim() in (2, 3) else None


def suggested_loss(output: Any, batch: Any) -> Tensor:
    """Its own loss where it has one; else what is usual for logits, maps and reconstructions; else a mean of all."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(found, Tensor):
        return found
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    output = logits if isinstance(logits, Tensor) else output
    if isinstance(output, Tensor) and output.is_floating_point():
        return _of_tensor(output, batch)
    floating = [item for item in _tensors(output) if item.is_floating_point() and item.requires_grad]
    if not floating:
        raise UserError(
            f"expected a network whose output has a gradient, found {_described(output)}: give a step with --step"
        )
    return torch.stack([item.float().mean() for item in floating]).sum()


def _of_tensor(output: Tensor, batch: Any) -> Tensor:
    if not output.dim():
        return output
    if output.dim() == 1 or any(output.shape == item.shape for item in _tensors(batch)):
        return loss_of("mse", output)
    if output.dim() < 4:
        return loss_of("cross_entropy", output)
    # a map of classes: channels first, as F.cross_entropy takes it
    targets = torch.randint(output.shape[1], (output.shape[0], *output.shape[2:]), device=output.device)
    return F.cross_entropy(output, targets)


def _tensors(value: Any) -> list[Tensor]:
    plain = dict(value) if isinstance(value, Mapping) else value  # outputs of transformers are mappings of their own
    return [item for item in tree_leaves(plain) if isinstance(item, Tensor)]


def _described(value: Any) -> str:
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    return f"{type(value).__name__}{shape}"
