"""Layers that several families share."""

from collections.abc import Sequence
from math import gcd
from typing import Any

from vramcast.errors import check_choice, check_count, check_probability
from vramcast.jobs.plan import Node, layer

ACTIVATIONS = {
    "relu": "ReLU",
    "leaky_relu": "LeakyReLU",
    "prelu": "PReLU",
    "elu": "ELU",
    "selu": "SELU",
    "tanh": "Tanh",
    "softplus": "Softplus",
    "swish": "SiLU",
    "mish": "Mish",
    "gelu": "GELU",
    "identity": "Identity",
}
HEADS = {"none": None, "softmax": "Softmax", "sigmoid": "Sigmoid", "identity": "Identity"}
IMAGE_NORMS = ("none", "batch", "group", "instance")
MOST_LAYERS, MOST_ELEMENTS = 10_000, 2**30
"""Far above what is trained: a list of more layers fills the memory of the host, and torch counts bytes in 63 bits."""
_LAYERS = ("depth", "layers", "blocks")
_MAX_GROUPS = 32  # GroupNorm's paper (Wu and He 2018) uses 32 groups


def check_factors(net: Any, counts: Sequence[str], norms: Sequence[str]) -> None:
    """Check the factors of a network that are counts, and those that all families have."""
    for name in counts:
        check_size(name, getattr(net, name))
    check_choice("network.activation", net.activation, ACTIVATIONS)
    check_choice("network.norm", net.norm, norms)
    check_probability("network.dropout", net.dropout)
    check_choice("network.head", getattr(net, "head", "none"), HEADS)


def check_size(name: str, value: Any, least: int = 1) -> None:
    """Check a factor that counts layers, or elements in one dimension of a tensor."""
    check_count(f"network.{name}", value, least, MOST_LAYERS if name in _LAYERS else MOST_ELEMENTS)


def activation(name: str) -> Node:
    """Return the activation layer of this name, as the public data sets use it."""
    return layer(ACTIVATIONS[name])


def dropout(rate: float) -> list[Node]:
    """Return a dropout layer, or no layer at rate zero."""
    return [layer("Dropout", p=rate)] if rate else []


def head(name: str) -> list[Node]:
    """Return the layer that turns scores into probabilities, or no layer."""
    kind = HEADS[name]
    if kind is None:
        return []
    return [layer(kind, dim=1) if kind == "Softmax" else layer(kind)]


def image_norm(name: str, channels: int) -> list[Node]:
    """Return the norm after a convolution, or no layer."""
    if name == "batch":
        return [layer("BatchNorm2d", num_features=channels)]
    if name == "group":
        return [layer("GroupNorm", num_groups=gcd(_MAX_GROUPS, channels), num_channels=channels)]
    if name == "instance":
        return [layer("InstanceNorm2d", num_features=channels, affine=True)]
    return []
