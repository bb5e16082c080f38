"""A training loop in plain torch: AdamW, a decaying learning rate, and the best epoch by validation loss."""

import copy
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from vramcast.models.estimators.batch import Batch


class Fittable(Protocol):
    """A network with a loss."""

    network_: nn.Module

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean loss of a batch."""


@dataclass(frozen=True)
class PlainFitter:
    """Trains until the validation loss has not improved for `patience` epochs, and restores the best weights."""

    epochs: int = 200
    patience: int = 40
    batch_size: int = 64
    learning_rate: float = 2e-3
    weight_decay: float = 1e-2
    most_gradient: float = 1.0
    """The norm to which gradients are clipped, because an outlier has a likelihood near zero."""

    def __call__(self, classifier: Fittable, train: Batch, validation: Batch) -> None:
        """Fit in place, with torch's generator, which the caller seeds."""
        network = classifier.network_
        optimizer = torch.optim.AdamW(network.parameters(), self.learning_rate, weight_decay=self.weight_decay)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs, self.learning_rate / 50)
        best, best_weights, best_epoch = float("inf"), copy.deepcopy(network.state_dict()), 0
        for epoch in range(self.epochs):
            self._train(classifier, train, optimizer)
            schedule.step()
            loss = validation_loss(classifier, validation, self.batch_size)
            if loss < best:
                best, best_weights, best_epoch = loss, copy.deepcopy(network.state_dict()), epoch
            elif epoch - best_epoch >= self.patience:
                break
        network.load_state_dict(best_weights)

    def _train(self, classifier: Fittable, train: Batch, optimizer: torch.optim.Optimizer) -> None:
        classifier.network_.train()
        for rows in train.shuffled(self.batch_size):
            optimizer.zero_grad()
            torch.autograd.backward(classifier.loss(train.select(rows)))
            nn.utils.clip_grad_norm_(classifier.network_.parameters(), self.most_gradient)
            optimizer.step()


def validation_loss(classifier: Fittable, validation: Batch, batch_size: int) -> float:
    """Return the loss over a whole set, without dropout."""
    classifier.network_.eval()
    with torch.inference_mode():
        parts = torch.split(torch.arange(len(validation)), batch_size)
        return sum(float(classifier.loss(validation.select(rows))) * len(rows) for rows in parts) / len(validation)
