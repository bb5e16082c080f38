"""Small versions of twelve kinds of networks, for the comparison of the own plan with Inductor's."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the usual name

WIDTH, VOCABULARY, LENGTH = 256, 2048, 128


class Attention(nn.Module):
    """Attention with separate projections, of a sequence to itself or to another."""

    def __init__(self, causal: bool = False, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """Attend."""
        source = x if other is None else other
        q, k, v = (
            layer(item).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, item in ((self.q, x), (self.k, source), (self.v, source))
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """A Transformer block: layer norms and GELU, or RMS norms and SwiGLU; with cross-attention if it has a source."""

    def __init__(self, causal: bool = False, gated: bool = False, crossed: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        norm = nn.RMSNorm if gated else nn.LayerNorm
        self.norms = nn.ModuleList(norm(WIDTH) for _ in range(3))
        self.attention, self.crossed = Attention(causal), Attention() if crossed else None
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 4 * WIDTH) if gated else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        """Add attention and an MLP."""
        x = x + self.dropout(self.attention(self.norms[0](x)))
        if self.crossed is not None:
            x = x + self.crossed(self.norms[2](x), source)
        normed = self.norms[1](x)
        hidden = F.gelu(self.up(normed)) if self.gate is None else F.silu(self.gate(normed)) * self.up(normed)
        return x + self.dropout(self.down(hidden))


class Language(nn.Module):
    """Tokens, blocks and logits, with the loss that its trainer computes."""

    def __init__(self, blocks: Callable[[], nn.Module], depth: int = 3) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(blocks() for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        out: Tensor = self.head(self.norm(self.blocks(x)))
        return out


class Translation(nn.Module):
    """An encoder and a decoder, as T5."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.Sequential(*(Block(dropout=0.1) for _ in range(2)))
        self.decoder = nn.ModuleList(Block(causal=True, crossed=True, dropout=0.1) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = self.tokens(tokens)
        source = self.encoder(x)
        for block in self.decoder:
            x = block(x, source)
        out: Tensor = self.head(x)
        return out


class Vision(nn.Module):
    """A ViT; with `conditioned`, each block is scaled and shifted by an embedding, as in DiT."""

    def __init__(self, conditioned: bool = False) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 8, stride=8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.condition = nn.Linear(WIDTH, 2 * WIDTH) if conditioned else None
        self.head = nn.Linear(WIDTH, 100)

    def forward(self, images: Tensor) -> Tensor:
        """Return classes."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            if self.condition is not None:
                scale, shift = self.condition(F.silu(x.mean(1, keepdim=True))).chunk(2, dim=-1)
                x = x * (1 + scale) + shift
            x = block(x)
        out: Tensor = self.head(x.mean(1))
        return out


class Residual(nn.Module):
    """Two convolutions with batch norm and a shortcut, as in ResNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Add."""
        out: Tensor = F.relu(x + self.norms[1](self.second(F.relu(self.norms[0](self.first(x))))))
        return out


class Depthwise(nn.Module):
    """A depthwise convolution and an MLP over channels, as in ConvNeXt."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add."""
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)


class Convolutional(nn.Module):
    """A stem, blocks and a pooled head."""

    def __init__(self, block: Callable[[int], nn.Module], width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*(block(width) for _ in range(3)))
        self.head = nn.Linear(width, 100)

    def forward(self, images: Tensor) -> Tensor:
        """Return classes."""
        out: Tensor = self.head(self.blocks(F.relu(self.stem(images))).mean((2, 3)))
        return out


class UNet(nn.Module):
    """Down, up, and a concatenation across, with group norms."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.enter, self.down = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle, self.up = nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.Conv2d(3 * width, width, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(8, size) for size in (width, 2 * width, 2 * width, width))
        self.leave = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        """Return images."""
        first = F.silu(self.norms[0](self.enter(images)))
        x = F.silu(self.norms[1](self.down(first)))
        x = F.silu(self.norms[2](self.middle(x)))
        x = torch.cat((F.interpolate(x, scale_factor=2.0), first), dim=1)
        out: Tensor = self.leave(F.silu(self.norms[3](self.up(x))))
        return out


class Scan(nn.Module):
    """A gated recurrence over positions, as in state-space networks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Scan in logarithms, by cumulative sums."""
        gate, value = self.into(self.norm(x)).chunk(2, dim=-1)
        decay = F.logsigmoid(gate).cumsum(1)
        state = (value * (-decay).exp()).cumsum(1) * decay.exp()
        return x + self.out(state * torch.sigmoid(gate))


class Experts(nn.Module):
    """A mixture of four experts, all of which run, weighted by a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.up, self.down = (nn.Parameter(torch.empty(4, *size)) for size in ((WIDTH, WIDTH), (WIDTH, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        """Mix."""
        weights = self.router(x).softmax(-1)
        hidden = F.silu(torch.einsum("btd,edh->bteh", x, self.up))
        return x + torch.einsum("bteh,ehd,bte->btd", hidden, self.down, weights)


@dataclass(frozen=True)
class Case:
    """A network with its batch and its loss."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Any, ...]]
    loss: str = "cross_entropy"
    autocast: str | None = "bf16"


def _tokens(size: int) -> tuple[Tensor]:
    return (torch.zeros(size, LENGTH, dtype=torch.long, device="meta"),)


def _images(size: int) -> tuple[Tensor]:
    return (torch.empty(size, 3, 64, 64, device="meta"),)


def _plain_block(width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(width, width, 3), nn.GELU())


CASES = {
    "GPT-2": Case(partial(Language, partial(Block, causal=True, dropout=0.1)), _tokens),
    "Llama": Case(partial(Language, partial(Block, causal=True, gated=True)), _tokens),
    "BERT": Case(partial(Language, partial(Block, dropout=0.1)), _tokens),
    "T5": Case(Translation, _tokens),
    "ViT": Case(Vision, _images),
    "DiT": Case(partial(Vision, conditioned=True), _images),
    "ResNet": Case(partial(Convolutional, Residual), _images, autocast=None),
    "ConvNeXt": Case(partial(Convolutional, Depthwise), _images),
    "U-Net": Case(UNet, _images, loss="mse"),
    "scan": Case(partial(Language, Scan), _tokens, autocast=None),
    "experts": Case(partial(Language, Experts), _tokens),
    "convolutions": Case(partial(Convolutional, _plain_block), _images),
}  # fmt: skip
"""Small versions; only shapes and the order of operators count."""
