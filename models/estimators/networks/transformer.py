"""Attention over the layers of a network, joined to the vector of features."""

import math

import torch
from torch import Tensor, nn

from vramcast.models.estimators.batch import Inputs
from vramcast.models.estimators.networks.mlp import ResidualMlp


class TokenNetwork(nn.Module):
    """An encoder over tokens, pooled without padding, and a residual MLP over the result and the vector."""

    def __init__(
        self,
        inputs: int,
        kinds: int,
        token_numbers: int,
        token_width: int,
        heads: int,
        layers: int,
        width: int,
        blocks: int,
        outputs: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.kinds = nn.Embedding(kinds + 1, token_width)  # 0: unknown, or padding
        self.numbers = nn.Linear(token_numbers, token_width)
        # dropout only in the body: within attention it would take a third of the time
        layer = nn.TransformerEncoderLayer(
            token_width, heads, 2 * token_width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(token_width), enable_nested_tensor=False)
        self.body = ResidualMlp(inputs + 2 * token_width, width, blocks, outputs, dropout)

    def forward(self, inputs: Inputs) -> Tensor:
        """Return [n, outputs]."""
        x = self.kinds(inputs.kinds) + self.numbers(inputs.tokens)
        x = self.encoder(x + positions(x.shape[1], x.shape[2]), src_key_padding_mask=inputs.padding)
        out: Tensor = self.body(torch.cat([inputs.vector, *pooled(x, inputs.padding)], dim=1))
        return out


def positions(length: int, width: int) -> Tensor:
    """Return [length, width]: sinusoidal position encodings (Vaswani et al. 2017)."""
    position = torch.arange(length, dtype=torch.float32)[:, None]
    rates = torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * (-math.log(10_000.0) / width))
    return torch.stack([torch.sin(position * rates), torch.cos(position * rates)], dim=2).flatten(1)[:, :width]


def pooled(x: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the maximum over the tokens without padding, [n, width] each."""
    is_padding = padding[:, :, None]
    mean = x.masked_fill(is_padding, 0).sum(1) / (~is_padding).sum(1).clamp(min=1)
    return mean, x.masked_fill(is_padding, -torch.inf).amax(1)
