"""Losses around a network, as the training loops of the sources compute them."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name that every PyTorch reader knows


class LanguageLoss(nn.Module):
    """The cross entropy of logits in fp32; `keeps` the logits until the next step, as a local variable does."""

    def __init__(self, subject: nn.Module, keeps: bool = False) -> None:
        super().__init__()
        self.subject = subject
        self.keeps = keeps
        self.loss_function = cross_entropy
        """Compiled by the training setup's compile_loss."""

    def forward(self, tokens: Tensor, labels: Tensor) -> "Output":
        """Return the loss of next tokens."""
        logits = self.subject(tokens)
        loss = self.loss_function(logits, labels)
        return Output(loss, logits if self.keeps else None)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy in fp32 (torchtitan, components/loss.py)."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class Output:
    """A loss, and the logits that a loop keeps alive with it."""

    def __init__(self, loss: Tensor, logits: Any) -> None:
        self.loss = loss
        self.logits = logits
