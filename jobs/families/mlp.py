"""Multi-layer perceptrons in the four shapes of GPUMemNet."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from vramcast.errors import check_choice
from vramcast.jobs.families.shared_layers import activation, check_factors, dropout, head
from vramcast.jobs.plan import InputTensor, Node, Plan, chain, layer

NORMS = ("none", "batch", "layer")


@dataclass(frozen=True, kw_only=True)
class MlpNetwork:
    """The factors of an MLP."""

    arch: str
    input_features: int
    output_features: int
    depth: int
    activation: str = "relu"
    norm: str = "none"
    dropout: float = 0.0
    head: str = "none"

    def __post_init__(self) -> None:
        check_choice("network.arch", self.arch, WIDTHS)
        check_factors(self, ("input_features", "output_features", "depth"), NORMS)


def _halving(net: MlpNetwork, blocks: int) -> list[int]:
    widths = [net.input_features]
    for _ in range(blocks):
        widths.append(max(widths[-1] // 2, net.output_features))
    return widths[1:]


def _gradual(net: MlpNetwork) -> list[int]:
    step = (net.input_features - net.output_features) // net.depth
    widths = [net.input_features]
    for _ in range(net.depth):
        widths.append(max(widths[-1] - step, net.output_features))
    return widths[1:]


WIDTHS: dict[str, Callable[[MlpNetwork], list[int]]] = {
    "pyramid": lambda net: _halving(net, net.depth),
    "uniform": lambda net: [net.input_features] * net.depth,
    "bottleneck": lambda net: _halving(net, net.depth + 1),
    "gradual": _gradual,
}


def _block(net: MlpNetwork, wide_in: int, wide_out: int) -> Node:
    norms = {
        "none": [],
        "batch": [layer("BatchNorm1d", num_features=wide_out)],
        "layer": [layer("LayerNorm", normalized_shape=wide_out)],
    }
    return chain(
        layer("Linear", in_features=wide_in, out_features=wide_out),
        *norms[net.norm],
        activation(net.activation),
        *dropout(net.dropout),
    )


def plan(net: MlpNetwork) -> Plan:
    """Return blocks of decreasing or constant width, then the output layer."""
    widths = [net.input_features, *WIDTHS[net.arch](net)]
    blocks = [_block(net, wide_in, wide_out) for wide_in, wide_out in pairwise(widths)]
    output = layer("Linear", in_features=widths[-1], out_features=net.output_features)
    return Plan((InputTensor((net.input_features,)),), chain(*blocks, chain(output, *head(net.head))))
