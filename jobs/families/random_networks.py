"""Networks of random operators, drawn by a seed: branches, skip connections, and layers in no usual order."""

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from vramcast.jobs.plan import InputTensor

_ACTIVATIONS = (nn.ReLU, nn.GELU, nn.SiLU, nn.Hardswish, nn.LeakyReLU, nn.Sigmoid, nn.Tanh, nn.Mish)
_JOINED = 3
"""Most branches that a join reads."""


def random_network(network: Mapping[str, Any]) -> tuple[nn.Module, tuple[InputTensor, ...]]:
    """Return a network over images or sequences and its input.

    `network` has the kind ('image' or 'sequence'), the seed, the number of nodes, the width, the size of the input
    (a side or a length), and the classes.
    """
    rng = Random(int(network["seed"]))  # noqa: S311 - the same network for a seed
    make = _images if network["kind"] == "image" else _sequences
    return make(rng, int(network["nodes"]), int(network["width"]), int(network["size"]), int(network["classes"]))


class OperatorGraph(nn.Module):
    """Nodes that each read earlier ones, a stem before and a head behind them."""

    def __init__(self, stem: nn.Module, nodes: list[nn.Module], reads: list[list[int]], head: nn.Module) -> None:
        super().__init__()
        self.stem = stem
        self.nodes = nn.ModuleList(nodes)
        self.reads = reads
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Run the nodes in order; each value lives until its last reader has run."""
        values = {-1: self.stem(x)}
        last = {place: index for index, places in enumerate(self.reads) for place in places}
        for index, (node, places) in enumerate(zip(self.nodes, self.reads, strict=True)):
            values[index] = node(*(values[place] for place in places))
            for place in places:
                if last[place] == index:
                    del values[place]
        return self.head(values[len(self.nodes) - 1])  # type: ignore[no-any-return]


class Join(nn.Module):
    """Adds, multiplies or concatenates its inputs, brought to the shape of the first; a concatenation is projected."""

    def __init__(self, how: str, project: nn.Module | None) -> None:
        super().__init__()
        self.how = how
        self.project = project

    def forward(self, *values: Tensor) -> Tensor:
        """Return one tensor of the shape of the first."""
        first, *rest = values
        if self.project is not None:
            return self.project(torch.cat([first, *rest], 1 if first.dim() == 4 else -1))  # type: ignore[no-any-return]
        for other in rest:
            first = first + other if self.how == "add" else first * other
        return first


class Pooled(nn.Module):
    """Classifies the mean over all positions."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.classify = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return a score for each class."""
        return self.classify(x.mean((2, 3) if x.dim() == 4 else 1))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Self-attention of torch over a sequence."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return what each position attends to."""
        return self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """An LSTM or GRU over a sequence, without its states."""

    def __init__(self, cell: type[nn.LSTM] | type[nn.GRU], width: int) -> None:
        super().__init__()
        self.layer = cell(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        return self.layer(x)[0]  # type: ignore[no-any-return]


def _images(rng: Random, count: int, width: int, side: int, classes: int) -> tuple[nn.Module, tuple[InputTensor, ...]]:
    channels = -(-width // 8) * 8
    stem = nn.Sequential(nn.Conv2d(3, channels, 3, stride=rng.choice((1, 2)), padding=1), nn.BatchNorm2d(channels))
    nodes: list[nn.Module] = []
    reads: list[list[int]] = []
    since, reduced = -1, side
    for index in range(count):
        if reduced > 8 and rng.random() < 3 / count:
            wider = min(channels * rng.choice((1, 2)), 8 * width)
            nodes.append(_reduction(rng, channels, wider))
            reads.append([index - 1])
            channels, since, reduced = wider, index, reduced // 2
        else:
            reads.append(_readers(rng, index, since))
            nodes.append(_join_images(rng, channels, len(reads[-1])) if len(reads[-1]) > 1 else _image(rng, channels))
    return OperatorGraph(stem, nodes, reads, Pooled(channels, classes)), (InputTensor((3, side, side)),)


def _readers(rng: Random, index: int, since: int) -> list[int]:
    """Return the nodes that a node reads: the one before, and sometimes others of the same shape."""
    earlier = list(range(since, index - 1))
    if not earlier or rng.random() < 0.6:
        return [index - 1]
    return [index - 1, *sorted(rng.sample(earlier, min(len(earlier), rng.randint(1, _JOINED - 1))))]


def _join_images(rng: Random, channels: int, count: int) -> nn.Module:
    how = rng.choice(("add", "add", "multiply", "cat"))
    return Join(how, nn.Conv2d(count * channels, channels, 1) if how == "cat" else None)


def _reduction(rng: Random, channels: int, wider: int) -> nn.Module:
    if wider == channels and rng.random() < 0.5:
        return rng.choice((nn.MaxPool2d, nn.AvgPool2d))(2)
    return nn.Conv2d(channels, wider, rng.choice((2, 3, 5)), stride=2, padding=1, bias=rng.random() < 0.5)


def _image(rng: Random, channels: int) -> nn.Module:
    bias = rng.random() < 0.5
    kernel, inner = rng.choice((1, 3, 3, 5, 7)), channels * rng.choice((2, 4))
    groups = rng.choice((2, 4, 8, channels))
    kinds: list[Callable[[], nn.Module]] = [
        *[lambda: nn.Conv2d(channels, channels, kernel, padding=kernel // 2, bias=bias)] * 3,
        *[lambda: nn.Conv2d(channels, channels, 3, padding=1, groups=groups, bias=bias)] * 2,
        lambda: nn.BatchNorm2d(channels),
        lambda: rng.choice((nn.GroupNorm(8, channels), nn.InstanceNorm2d(channels))),
        *[rng.choice(_ACTIVATIONS)] * 2,
        lambda: rng.choice((nn.Dropout(0.2), nn.Dropout2d(0.1))),
        lambda: nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=bias), nn.BatchNorm2d(inner), rng.choice(_ACTIVATIONS)(),
            nn.Conv2d(inner, channels, 1, bias=bias),
        ),
    ]  # fmt: skip
    return rng.choice(kinds)()


def _sequences(
    rng: Random, count: int, width: int, length: int, classes: int
) -> tuple[nn.Module, tuple[InputTensor, ...]]:
    width = -(-width // 16) * 16
    words = rng.choice((1000, 8000, 32000))
    reads = [_readers(rng, index, -1) for index in range(count)]
    nodes = [_join_sequences(rng, width, len(item)) if len(item) > 1 else _sequence(rng, width) for item in reads]
    head = Pooled(width, classes) if rng.random() < 0.5 else nn.Linear(width, classes)
    return OperatorGraph(nn.Embedding(words, width), nodes, reads, head), (InputTensor((length,), words),)


def _join_sequences(rng: Random, width: int, count: int) -> nn.Module:
    how = rng.choice(("add", "add", "multiply", "cat"))
    return Join(how, nn.Linear(count * width, width) if how == "cat" else None)


def _sequence(rng: Random, width: int) -> nn.Module:
    inner = width * rng.choice((2, 4))
    kinds: list[Callable[[], nn.Module]] = [
        *[lambda: nn.Linear(width, width, bias=rng.random() < 0.7)] * 2,
        lambda: rng.choice((nn.LayerNorm(width), nn.RMSNorm(width))),
        rng.choice(_ACTIVATIONS),
        lambda: Attention(width, rng.choice((2, 4, 8))),
        lambda: Recurrent(rng.choice((nn.LSTM, nn.GRU)), width),
        lambda: nn.Dropout(0.1),
        lambda: nn.Sequential(nn.Linear(width, inner), rng.choice(_ACTIVATIONS)(), nn.Linear(inner, width)),
    ]
    return rng.choice(kinds)()
