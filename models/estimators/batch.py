"""Examples as tensors: the inputs of networks, and the labels of their loss."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

_POOLED = 8
"""Mini-batches in one pool of examples, which is sorted by length."""


@dataclass(frozen=True)
class Inputs:
    """Encoded examples. Networks that read no sequence get sequences of length 0."""

    vector: Tensor  # [n, features]
    kinds: Tensor  # [n, length], indices into the encoder's kinds, 0 where unknown or padding
    tokens: Tensor  # [n, length, token numbers]
    padding: Tensor  # [n, length], true where there is no layer

    def __len__(self) -> int:
        return len(self.vector)

    def select(self, rows: Tensor) -> Self:
        """Return some of the examples, padded to the longest of them."""
        padding = self.padding[rows]
        length = int((~padding).sum(1).max()) if padding.numel() else 0
        tokens = self.tokens[rows, :length]
        return type(self)(self.vector[rows], self.kinds[rows, :length], tokens, padding[:, :length])


@dataclass(frozen=True)
class GapLabels:
    """Gaps: logarithms of used memory over the reference. A job that did not fit has a lower bound only."""

    fits: Tensor  # [n]
    lower: Tensor  # [n], a narrow interval around the measurement; the capacity for jobs that did not fit
    upper: Tensor  # [n], meaningless for jobs that did not fit
    bucket_lower: Tensor  # [n], the correct bucket
    bucket_upper: Tensor  # [n]
    parts: Tensor  # [n, PARTS], see `labels.part_gaps`; nan where a measurement does not tell them

    def select(self, rows: Tensor) -> Self:
        """Return the labels of some examples."""
        return type(self)(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Batch:
    """Examples with their labels."""

    inputs: Inputs
    labels: GapLabels

    def __len__(self) -> int:
        return len(self.inputs)

    def select(self, rows: Tensor) -> Self:
        """Return some of the examples."""
        return type(self)(self.inputs.select(rows), self.labels.select(rows))

    def shuffled(self, size: int) -> list[Tensor]:
        """Return the indices of an epoch's mini-batches in random order.

        Examples of similar length share a mini-batch, whose cost grows with the square of the longest.
        """
        order = torch.randperm(len(self))
        lengths = (~self.inputs.padding).sum(1)
        pools = [pool[lengths[pool].argsort(stable=True)] for pool in torch.split(order, _POOLED * size)]
        parts = [part for pool in pools for part in torch.split(pool, size)]
        return [parts[index] for index in torch.randperm(len(parts)).tolist()]
