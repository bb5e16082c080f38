"""Modules that torch.nn lacks. Each is self-contained: `emit` copies its source into a script that needs only torch."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name that every PyTorch reader knows
from torch.utils.checkpoint import checkpoint


class CheckpointedSequential(nn.Sequential):
    """Runs its children in turn and recomputes each in the backward pass; nested ones checkpoint their own children."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            inner = isinstance(block, CheckpointedSequential)
            x = block(x) if inner else checkpoint(block, x, use_reentrant=False)
        return x


class Encoder(nn.Sequential):
    """Layers in a module of their own, like nn.TransformerEncoder: its caller keeps the input alive until the end."""


class Residual(nn.Module):
    """Adds the outputs of a body and a shortcut. Their order decides when memory is allocated."""

    def __init__(self, body: nn.Module, shortcut: nn.Module, shortcut_first: bool = False) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut
        self.shortcut_first = shortcut_first

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.shortcut, self.body) if self.shortcut_first else (self.body, self.shortcut)
        out: Tensor = first(x)
        return torch.add(out, second(x))


class DenseBlock(nn.Module):
    """Feeds each layer with all previous features, concatenated along the channels."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, dim=1)))
        return torch.cat(features, dim=1)


class LearnedPositions(nn.Module):
    """Adds a learned vector for each position of the sequence."""

    def __init__(self, length: int, size: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(1, length, size))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.positions


class MeanOverSequence(nn.Module):
    """Averages over the positions of a sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)


class CausalSelfAttention(nn.Module):
    """Attention in which a position sees only itself and earlier ones."""

    def __init__(self, size: int, heads: int, dropout: float) -> None:
        super().__init__()
        assert size % heads == 0, f"{heads} heads do not divide {size}"
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(size, 3 * size)
        self.projection = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, size = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        out = self.projection(out.transpose(1, 2).reshape(batch, length, size))
        assert isinstance(out, Tensor)
        return out


class EncoderDecoder(nn.Module):
    """Encodes one sequence and decodes another that attends to it."""

    def __init__(
        self, source: nn.Module, target: nn.Module, layers: nn.Sequential, head: nn.Module, checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.source = source
        self.target = target
        self.layers = layers
        self.head = head
        self.checkpointing = checkpointing

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.source(source)
        x = self.target(target)
        for layer in self.layers:
            x = checkpoint(layer, x, memory, use_reentrant=False) if self.checkpointing else layer(x, memory)
        out: Tensor = self.head(x)
        return out
