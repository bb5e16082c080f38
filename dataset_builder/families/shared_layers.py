"""Layers that several families share."""

from math import gcd

from vramcast.dataset_builder.plan import Node, layer

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
_MAX_GROUPS = 32  # GroupNorm's paper (Wu and He 2018) uses 32 groups


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
