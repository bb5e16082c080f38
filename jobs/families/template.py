"""Templates of VGG, ResNet and MobileNet that a structure array mutates, as in TBEM's Algorithm 1."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vramcast.errors import UserError, check_choice, check_count
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

# Stages as (filters, convolutions or blocks), as published: VGG-16 (Simonyan and Zisserman 2014, configuration D),
# ResNet-18 (He et al. 2015, table 1), MobileNet (Howard et al. 2017, table 1).
TEMPLATES: dict[str, tuple[tuple[int, int], ...]] = {
    "vgg": ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)),
    "resnet": ((64, 2), (128, 2), (256, 2), (512, 2)),
    "mobilenet": ((64, 1), (128, 2), (256, 2), (512, 6), (1024, 2)),
}
ORDERS = ("forward", "reversed", "rotated", "interleaved")
_VGG_POOLED = 7


@dataclass(frozen=True, kw_only=True)
class TemplateNetwork:
    """The factors of a mutated template. Images are square."""

    template: str
    stages: Sequence[Sequence[int]]
    """(filters, convolutions or blocks) of each stage, in order."""
    input_size: int
    num_classes: int
    input_channels: int = 3
    kernel_size: int = 3
    padding: int = 1
    pool_size: int = 2
    """Kernel size of the pooling at the end of a VGG stage; its stride is 2."""
    classifier_features: int = 4096
    """Width of the two hidden layers of VGG's classifier."""
    activation: str = "relu"
    norm: str = "none"
    dropout: float = 0.0
    head: str = "none"

    def __post_init__(self) -> None:
        check_choice("network.template", self.template, TEMPLATES)
        lists = isinstance(self.stages, Sequence) and all(isinstance(stage, Sequence) for stage in self.stages)
        if not (lists and self.stages and all(len(stage) == 2 for stage in self.stages)):
            raise UserError(
                f"expected network.stages as [[filters, blocks], ...], found {self.stages!r}: write it like that"
            )
        for filters, blocks in self.stages:
            check_size("stages", filters)
            check_size("stages", blocks)
        check_size("blocks", sum(blocks for _, blocks in self.stages))
        counts = ("input_size", "num_classes", "input_channels", "kernel_size", "pool_size", "classifier_features")
        check_factors(self, counts, IMAGE_NORMS)
        check_size("padding", self.padding, least=0)


def unused(net: TemplateNetwork) -> set[str]:
    """Return the factors that only VGG uses, for other templates."""
    return set() if net.template == "vgg" else {"pool_size", "classifier_features"}


def mutate(template: str, stages: int, extra_convolutions: int, order: str, width: float = 1.0) -> list[list[int]]:
    """Return the stages of a template with another depth, convolutions per block, block order and width.

    A depth beyond the template's repeats its last stage.
    """
    check_choice("template", template, TEMPLATES)
    check_count("stages", stages)
    check_choice("order", order, ORDERS)
    original = TEMPLATES[template]
    resized = [original[min(i, len(original) - 1)] for i in range(stages)]
    changed = [[max(1, int(filters * width)), max(1, blocks + extra_convolutions)] for filters, blocks in resized]
    return _ordered(changed, order)


def _ordered(stages: list[list[int]], order: str) -> list[list[int]]:
    if order == "reversed":
        return stages[::-1]
    if order == "rotated":
        return stages[1:] + stages[:1]
    if order == "interleaved":  # first, last, second, last but one, ...
        return [stages[i // 2] if i % 2 == 0 else stages[-1 - i // 2] for i in range(len(stages))]
    return stages


def _convolution(net: TemplateNetwork, channels: int, filters: int, *, stride: int = 1, groups: int = 1) -> Node:
    return layer(
        "Conv2d",
        in_channels=channels,
        out_channels=filters,
        kernel_size=net.kernel_size,
        stride=stride,
        padding=net.padding,
        groups=groups,
        bias=net.norm == "none",  # a norm has its own shift, so the papers use no bias
    )


def _pointwise(net: TemplateNetwork, channels: int, filters: int, stride: int = 1) -> Node:
    return layer(
        "Conv2d", in_channels=channels, out_channels=filters, kernel_size=1, stride=stride, bias=net.norm == "none"
    )


def _finish(net: TemplateNetwork, filters: int) -> list[Node]:
    return [*image_norm(net.norm, filters), activation(net.activation)]


def _stem(net: TemplateNetwork, filters: int, kernel_size: int) -> list[Node]:
    conv = layer(
        "Conv2d",
        in_channels=net.input_channels,
        out_channels=filters,
        kernel_size=kernel_size,
        stride=2,
        padding=kernel_size // 2,
        bias=net.norm == "none",
    )
    return [conv, *_finish(net, filters)]


def _vgg(net: TemplateNetwork) -> list[Node]:
    blocks = []
    channels = net.input_channels
    for filters, count in net.stages:
        layers: list[Node] = []
        for _ in range(count):
            layers += [_convolution(net, channels, filters), *_finish(net, filters)]
            channels = filters
        blocks.append(chain(*layers, layer("MaxPool2d", kernel_size=net.pool_size, stride=2)))
    features = channels * _VGG_POOLED**2
    return [
        *blocks,
        chain(layer("AdaptiveAvgPool2d", output_size=_VGG_POOLED), layer("Flatten"), *_classifier(net, features)),
    ]


def _classifier(net: TemplateNetwork, features: int) -> list[Node]:
    layers: list[Node] = []
    for wide_in in (features, net.classifier_features):
        layers += [
            layer("Linear", in_features=wide_in, out_features=net.classifier_features),
            activation(net.activation),
        ]
        layers += dropout(net.dropout)
    return [*layers, layer("Linear", in_features=net.classifier_features, out_features=net.num_classes)]


def _resnet(net: TemplateNetwork) -> list[Node]:
    channels = 64
    blocks = [chain(*_stem(net, channels, 7), layer("MaxPool2d", kernel_size=3, stride=2, padding=1))]
    for index, (filters, count) in enumerate(net.stages):
        for i in range(count):
            stride = 2 if index > 0 and i == 0 else 1
            blocks.append(_basic_block(net, channels, filters, stride))
            channels = filters
    return [*blocks, _pooled_classifier(net, channels)]


def _basic_block(net: TemplateNetwork, channels: int, filters: int, stride: int) -> Node:
    body = chain(
        _convolution(net, channels, filters, stride=stride),
        *_finish(net, filters),
        _convolution(net, filters, filters),
        *image_norm(net.norm, filters),
    )
    same = channels == filters and stride == 1
    shortcut = (
        layer("Identity") if same else chain(_pointwise(net, channels, filters, stride), *image_norm(net.norm, filters))
    )
    return chain(Node("Residual", {}, (body, shortcut)), activation(net.activation))


def _mobilenet(net: TemplateNetwork) -> list[Node]:
    channels = 32
    blocks = [chain(*_stem(net, channels, 3))]
    for index, (filters, count) in enumerate(net.stages):
        for i in range(count):
            stride = 2 if index > 0 and i == 0 else 1
            depthwise = _convolution(net, channels, channels, stride=stride, groups=channels)
            blocks.append(
                chain(depthwise, *_finish(net, channels), _pointwise(net, channels, filters), *_finish(net, filters))
            )
            channels = filters
    return [*blocks, _pooled_classifier(net, channels)]


def _pooled_classifier(net: TemplateNetwork, channels: int) -> Node:
    return chain(
        layer("AdaptiveAvgPool2d", output_size=1),
        layer("Flatten"),
        *dropout(net.dropout),
        layer("Linear", in_features=channels, out_features=net.num_classes),
    )


_BLOCKS: dict[str, Callable[[TemplateNetwork], list[Node]]] = {"vgg": _vgg, "resnet": _resnet, "mobilenet": _mobilenet}


def plan(net: TemplateNetwork) -> Plan:
    """Return the stages of the template and its output layers."""
    *blocks, output = _BLOCKS[net.template](net)
    image = InputTensor((net.input_channels, net.input_size, net.input_size))
    return Plan((image,), chain(*blocks, chain(output, *head(net.head))))
