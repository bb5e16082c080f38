"""Convolutional networks in the seven shapes of GPUMemNet, with pooling and other norms added."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, log2

from vramcast.errors import check_choice
from vramcast.jobs.families.shared_layers import (
    IMAGE_NORMS,
    activation,
    check_factors,
    check_size,
    dropout,
    head,
    image_norm,
)
from vramcast.jobs.plan import InputTensor, Node, Plan, chain, layer

POOLINGS = ("none", "max", "avg")
_DENSE_GROWTH = 32
_DENSE_LAYERS = 4
_LEAST_RESIDUAL_SIZE = 7


@dataclass(frozen=True, kw_only=True)
class CnnNetwork:
    """The factors of a CNN. Images are square."""

    arch: str
    input_channels: int
    input_size: int
    num_classes: int
    depth: int
    base_filters: int
    max_filters: int = 2048
    kernel_size: int = 3
    activation: str = "relu"
    norm: str = "none"
    dropout: float = 0.0
    pooling: str = "none"
    pool_every: int = 2
    """Number of convolution blocks between two pooling layers."""
    transition_every: int | None = None
    """Number of dense blocks between two transitions; None follows GPUMemNet's rule (dense shape only)."""
    head: str = "none"

    def __post_init__(self) -> None:
        check_choice("network.arch", self.arch, (*FILTERS, "residual", "dense"))
        counts = ["input_channels", "input_size", "num_classes", "depth", "base_filters", "max_filters", "kernel_size"]
        check_factors(self, [*counts, "pool_every"], IMAGE_NORMS)
        if self.transition_every is not None:
            check_size("transition_every", self.transition_every)
        check_choice("network.pooling", self.pooling, POOLINGS)


def unused(net: CnnNetwork) -> set[str]:
    """Return the factors without effect in this shape; `base_filters` of a dense shape is kept: it has no default."""
    names = set() if net.arch == "dense" else {"transition_every"}
    if net.arch in ("dense", "uniform"):
        names.add("max_filters")
    if net.arch == "dense" or net.pooling == "none":
        names |= {"pooling", "pool_every"}
    return names


def _grown(net: CnnNetwork, power: float, steps: float) -> int:
    growth: float = (net.max_filters / net.base_filters) ** (1 / steps)
    return min(int(net.base_filters * growth**power), net.max_filters)


def _bottleneck(net: CnnNetwork, i: int) -> int:
    if i == 0:
        return 2 * net.base_filters
    if net.depth <= 2:  # GPUMemNet doubles the filters if there are too few layers to spread the growth over
        return min(net.base_filters << (i - 1), net.max_filters)
    return _grown(net, i - 1, net.depth - 1)


def _hourglass(net: CnnNetwork, i: int) -> int:
    narrowing = net.depth // 2
    if i < narrowing:
        return _grown(net, i, narrowing)
    widening = net.depth - narrowing
    growth = (net.max_filters / net.base_filters) ** (1 / widening)
    return max(int(net.base_filters * growth ** (net.depth - i - 1)), net.base_filters)


FILTERS: dict[str, Callable[[CnnNetwork, int], int]] = {
    "pyramid": lambda net, i: _grown(net, i, net.depth),
    "uniform": lambda net, i: net.base_filters,
    "bottleneck": _bottleneck,
    "gradual": lambda net, i: _grown(net, i, 2 * net.depth),
    "hourglass": _hourglass,
}


def _convolution(net: CnnNetwork, channels: int, filters: int, stride: int = 1) -> Node:
    conv = layer(
        "Conv2d",
        in_channels=channels,
        out_channels=filters,
        kernel_size=net.kernel_size,
        stride=stride,
        padding=net.kernel_size // 2,
    )
    return chain(conv, *image_norm(net.norm, filters), activation(net.activation), *dropout(net.dropout))


def _pool(net: CnnNetwork, blocks: int) -> list[Node]:
    if net.pooling == "none" or blocks % net.pool_every:
        return []
    return [layer("MaxPool2d" if net.pooling == "max" else "AvgPool2d", kernel_size=2)]


def _plain(net: CnnNetwork) -> tuple[list[Node], int]:
    blocks: list[Node] = []
    channels = net.input_channels
    for i in range(net.depth):
        filters = FILTERS[net.arch](net, i)
        blocks += [_convolution(net, channels, filters), *_pool(net, i + 1)]
        channels = filters
    return blocks, channels


def _residual(net: CnnNetwork) -> tuple[list[Node], int]:
    blocks: list[Node] = []
    channels, size = net.input_channels, net.input_size
    for i in range(net.depth // 2):
        filters = _grown(net, i, net.depth)
        stride = 2 if i % 2 and size > _LEAST_RESIDUAL_SIZE else 1
        body = chain(_convolution(net, channels, filters, stride), _convolution(net, filters, filters))
        shortcut = _shortcut(net, channels, filters, stride)
        # GPUMemNet's blocks run the shortcut first
        blocks += [Node("Residual", {"shortcut_first": True}, (body, shortcut)), *_pool(net, i + 1)]
        channels, size = filters, size // stride
        if size <= _LEAST_RESIDUAL_SIZE:
            break
    return blocks, channels


def _shortcut(net: CnnNetwork, channels: int, filters: int, stride: int) -> Node:
    if channels == filters and stride == 1:
        return layer("Identity")
    conv = layer("Conv2d", in_channels=channels, out_channels=filters, kernel_size=1, stride=stride)
    return chain(conv, *image_norm(net.norm, filters))


def transition_rule(depth: int, input_size: int) -> int:
    """Return the number of dense blocks between two transitions by GPUMemNet's rule."""
    return max(1, ceil(depth / max(1, int(log2(max(1, input_size // 7))))))


def _dense(net: CnnNetwork) -> tuple[list[Node], int]:
    every = net.transition_every or transition_rule(net.depth, net.input_size)
    blocks: list[Node] = []
    channels, size, count = net.input_channels, net.input_size, net.depth // _DENSE_LAYERS
    for i in range(count):
        wide = [channels + _DENSE_GROWTH * k for k in range(_DENSE_LAYERS)]
        blocks.append(Node("DenseBlock", {}, tuple(_convolution(net, c, _DENSE_GROWTH) for c in wide)))
        channels += _DENSE_GROWTH * _DENSE_LAYERS
        if i % every == 0 and i != count - 1:
            blocks.append(_transition(net, channels, size))
            channels, size = channels // 2, max(1, size // 2)
    return blocks, channels


def _transition(net: CnnNetwork, channels: int, size: int) -> Node:
    conv = layer("Conv2d", in_channels=channels, out_channels=channels // 2, kernel_size=1)
    pool = [layer("AvgPool2d", kernel_size=2)] if size > 1 else []
    return chain(conv, *image_norm(net.norm, channels // 2), layer("ReLU"), *pool)


def plan(net: CnnNetwork) -> Plan:
    """Return convolution blocks in the given shape, global pooling, and the output layer."""
    make = {"residual": _residual, "dense": _dense}.get(net.arch, _plain)
    blocks, channels = make(net)
    tail = chain(
        layer("AdaptiveAvgPool2d", output_size=1),
        layer("Flatten"),
        layer("Linear", in_features=channels, out_features=net.num_classes),
        *head(net.head),
    )
    image = InputTensor((net.input_channels, net.input_size, net.input_size))
    return Plan((image,), chain(*blocks, tail))
