"""A decoder-only language network after the public description of Stanford's course CS336, written anew.

Pre-norm blocks, RMSNorm, rotary positions, causal attention as products of matrices, and SwiGLU; all products are
einsums. The stacks of recordings tell the order of operations and what each author's version keeps alive.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The shape of a network, with the names of the course."""

    layers: int
    width: int
    hidden: int
    heads: int
    vocabulary: int = 10_000


SHAPES = {
    "small": Shape(12, 768, 3072, 12),
    "medium": Shape(24, 1024, 4096, 16),
    "large": Shape(36, 1280, 5120, 20),
    "xl": Shape(32, 2560, 10_240, 32),
    "2.7b": Shape(32, 2560, 10_240, 32),
    "tiny": Shape(4, 512, 1344, 16),
}
"""As the recordings show them: xl has the shape of the course's 2.7B there."""


class Product(nn.Module):
    """A linear layer without bias, as an einsum."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class Lookup(nn.Module):
    """An embedding, as an index."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width))
        nn.init.normal_(self.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens, :]


class RootMeanSquareNorm(nn.Module):
    """Scales by the root of the mean square, in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        kind = x.dtype
        x = x.to(torch.float32)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * scale
        return (self.weight * x).to(kind)


class Rotary(nn.Module):
    """Rotates neighbouring pairs of features by the position."""

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        rates = 10_000.0 ** -(torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(context), rates)
        self.register_buffer("table", torch.stack((angles.cos(), angles.sin())), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        one, two = x.unflatten(-1, (-1, 2)).movedim(-1, 0)
        cosine, sine = self.table[:, : x.shape[-2]]
        first = cosine * one - sine * two
        second = sine * one + cosine * two
        return torch.concat((first[..., None], second[..., None]), -1).flatten(-2)


def softmax(scores: Tensor) -> Tensor:
    shifted = scores - torch.max(scores, -1, keepdim=True)[0]
    powers = torch.exp(shifted)
    return powers / torch.sum(powers, -1, keepdim=True)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("...qd,...kd->...qk", query, key) / math.sqrt(key.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, value)


class Attention(nn.Module):
    """Causal attention of several heads."""

    def __init__(self, shape: Shape, rotary: Rotary) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query, self.key, self.value, self.out = (Product(shape.width, shape.width) for _ in range(4))
        self.rotary = rotary

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(-2, -3)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        query, key, value = (self.split(item) for item in (query, key, value))
        query = self.rotary(query)
        key = self.rotary(key)
        places = torch.arange(x.shape[-2], device=x.device)
        mask = places[:, None] >= places
        mixed = attend(query, key, value, mask)
        mixed = mixed.transpose(-2, -3).flatten(-2)
        return self.out(mixed)


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class GatedLayer(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate, self.down, self.up = (
            Product(shape.width, shape.hidden), Product(shape.hidden, shape.width), Product(shape.width, shape.hidden),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and a gated layer, each behind a norm and beside a residual."""

    def __init__(self, shape: Shape, rotary: Rotary) -> None:
        super().__init__()
        self.attention = Attention(shape, rotary)
        self.layer = GatedLayer(shape)
        self.first, self.second = RootMeanSquareNorm(shape.width), RootMeanSquareNorm(shape.width)

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attention(self.first(x))
        attended_sum = x + attended
        transformed = self.layer(self.second(attended_sum))
        return attended_sum + transformed


class LanguageNetwork(nn.Module):
    """The whole network: logits of all positions."""

    def __init__(self, shape: Shape, context: int) -> None:
        super().__init__()
        self.lookup = Lookup(shape.vocabulary, shape.width)
        rotary = Rotary(context, shape.width // shape.heads)
        self.blocks = nn.ModuleList(Block(shape, rotary) for _ in range(shape.layers))
        self.norm = RootMeanSquareNorm(shape.width)
        self.head = Product(shape.width, shape.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.lookup(tokens)  # the recordings keep it to the end
        x = embedded
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
