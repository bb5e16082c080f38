"""DLRM as facebookresearch/dlrm trains it on Criteo's data (dlrm_s_pytorch.py; Naumov et al. 2019)."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name that every PyTorch reader knows


class Dlrm(nn.Module):
    """Embedding tables with sparse gradients, two MLPs, and the dot products of all pairs of features between them."""

    def __init__(self, rows: Sequence[int], bottom: Sequence[int], top: Sequence[int]) -> None:
        """Make tables of `rows` as wide as the last layer of the bottom MLP; the first of the top one follows."""
        super().__init__()
        features, width = len(rows) + 1, bottom[-1]
        self.tables = nn.ModuleList(nn.EmbeddingBag(count, width, mode="sum", sparse=True) for count in rows)
        self.bottom = _mlp(bottom, nn.ReLU())
        self.top = _mlp([width + features * (features - 1) // 2, *top], nn.Sigmoid())

    def forward(self, dense: Tensor, offsets: Tensor, indices: Tensor, targets: Tensor) -> SimpleNamespace:
        """Return the probability of a click and its loss."""
        x = self.bottom(dense)
        looked_up = [table(indices[place], offsets[place]) for place, table in enumerate(self.tables)]
        probability = self.top(_interact(x, looked_up))
        return SimpleNamespace(loss=F.binary_cross_entropy(probability, targets), probability=probability)


def _interact(x: Tensor, looked_up: list[Tensor]) -> Tensor:
    """Return the dense features and the products of all pairs, each pair once."""
    stacked = torch.cat([x, *looked_up], dim=1).view(len(x), -1, x.shape[1])
    products = torch.bmm(stacked, stacked.transpose(1, 2))
    rows, columns = torch.tril_indices(products.shape[1], products.shape[2], -1)
    return torch.cat([x, products[:, rows, columns]], dim=1)


def _mlp(sizes: Sequence[int], last: nn.Module) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1], last)


def criteo_batches(size: int, dense: int, tables: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield batches without data for ever: one index to a table and sample, as Criteo's data has it."""
    while True:
        places = [torch.empty(tables, size, dtype=torch.int64, device="meta") for _ in range(2)]
        yield torch.empty(size, dense, device="meta"), *places, torch.empty(size, 1, device="meta")
