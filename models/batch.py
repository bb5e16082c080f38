"""Examples as tensors: what networks read, and what their answers are held to."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

_POOLED = 8
"""Mini-batches that are cut from one pool of examples in the order of their lengths."""


@dataclass(frozen=True)
class Inputs:
    """Encoded examples. Networks without a sequence are given sequences of length 0."""

    vector: Tensor  # [n, features]
    kinds: Tensor  # [n, length], indices into the encoder's kinds, 0 where unknown or padding
    tokens: Tensor  # [n, length, token numbers]
    padding: Tensor  # [n, length], true where there is no layer

    def __len__(self) -> int:
        return len(self.vector)

    def select(self, rows: Tensor) -> Self:
        """Some of the examples, no longer than the longest of them."""
        padding = self.padding[rows]
        length = int((~padding).sum(1).max()) if padding.numel() else 0
        tokens = self.tokens[rows, :length]
        return type(self)(self.vector[rows], self.kinds[rows, :length], tokens, padding[:, :length])


@dataclass(frozen=True)
class Targets:
    """Gaps: logarithms of used memory over the reference. A job that did not fit has none but a lower bound."""

    fits: Tensor  # [n]
    lower: Tensor  # [n], a narrow interval around what was measured; for what did not fit, the card's limit
    upper: Tensor  # [n], of no meaning for what did not fit
    bucket_lower: Tensor  # [n], the bucket that is the right answer
    bucket_upper: Tensor  # [n]

    def select(self, rows: Tensor) -> Self:
        """Those of some examples."""
        return type(self)(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Batch:
    """Examples with their targets."""

    inputs: Inputs
    targets: Targets

    def __len__(self) -> int:
        return len(self.inputs)

    def select(self, rows: Tensor) -> Self:
        """Some of the examples."""
        return type(self)(self.inputs.select(rows), self.targets.select(rows))

    def shuffled(self, size: int) -> list[Tensor]:
        """The indices of an epoch's mini-batches, in an order from torch's generator.

        Examples meet others of about their length: what a mini-batch costs grows with the square of its longest.
        """
        order = torch.randperm(len(self))
        lengths = (~self.inputs.padding).sum(1)
        pools = [pool[lengths[pool].argsort(stable=True)] for pool in torch.split(order, _POOLED * size)]
        parts = [part for pool in pools for part in torch.split(pool, size)]
        return [parts[index] for index in torch.randperm(len(parts)).tolist()]
