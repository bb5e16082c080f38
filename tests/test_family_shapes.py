"""Templates have the published sizes, and layers have the widths computed by hand."""

from typing import Any

import pytest
from small_networks import NETWORKS, SETUP, table_of

from vramcast.errors import UserError
from vramcast.jobs import subject
from vramcast.jobs.families import cnn, make_spec, mlp, plan_of, template
from vramcast.jobs.plan import Plan

CNN, TRANSFORMER = NETWORKS["cnn"], NETWORKS["transformer"]


def widths(plan: Plan, kind: str, argument: str) -> list[int]:
    return [node.args[argument] for node in plan.root.walk() if node.kind == kind]


# --- templates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "norm", "parameters"),
    [("vgg", "none", 138_357_544), ("resnet", "batch", 11_689_512), ("mobilenet", "batch", 4_231_976)],
)
def test_templates_have_the_published_sizes(name: str, norm: str, parameters: int) -> None:
    """VGG-16, ResNet-18 and MobileNet v1 on ImageNet."""
    depth = len(template.TEMPLATES[name])
    stages = template.mutate(name, depth, 0, "forward")
    network = {"template": name, "stages": stages, "input_size": 224, "num_classes": 1000, "norm": norm}
    assert table_of("template", network).parameters == parameters
    module = subject.build_subject(plan_of(make_spec("template", network, SETUP)))
    assert sum(item.numel() for item in module.parameters()) == parameters


def test_mutate_orders_the_stages() -> None:
    forward = [[64, 2], [128, 2], [256, 3], [512, 3], [512, 3]]
    assert template.mutate("vgg", 5, 0, "forward") == forward
    assert template.mutate("vgg", 5, 0, "reversed") == forward[::-1]
    assert template.mutate("vgg", 5, 0, "rotated") == [*forward[1:], forward[0]]
    assert template.mutate("vgg", 4, 0, "interleaved") == [forward[0], forward[3], forward[1], forward[2]]
    assert template.mutate("vgg", 5, 0, "interleaved") == [forward[i] for i in (0, 4, 1, 3, 2)]


@pytest.mark.parametrize("name", template.TEMPLATES)
@pytest.mark.parametrize("order", template.ORDERS)
@pytest.mark.parametrize("stages", [1, 2, 7])
def test_every_order_keeps_all_stages(name: str, order: str, stages: int) -> None:
    mutated = template.mutate(name, stages, 1, order)
    assert sorted(mutated) == sorted(template.mutate(name, stages, 1, "forward"))
    assert len(mutated) == stages


def test_mutate_repeats_the_last_stage_of_the_template() -> None:
    assert template.mutate("resnet", 6, 0, "forward")[3:] == [[512, 2]] * 3


def test_mutate_keeps_at_least_one_convolution_and_one_filter() -> None:
    assert template.mutate("mobilenet", 2, -5, "forward", width=0.001) == [[1, 1], [1, 1]]
    assert template.mutate("vgg", 2, 2, "forward", width=0.5) == [[32, 4], [64, 4]]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("alexnet", 2, 0, "forward"), "expected template to be one of"),
        (("vgg", 0, 0, "forward"), "expected stages to be a whole number from 1, found 0"),
        (("vgg", 2, 0, "sideways"), "expected order to be one of .*, found 'sideways'"),
    ],
)
def test_mutate_rejects_unknown_values(arguments: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        template.mutate(*arguments)


# --- widths by hand ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        ("pyramid", [50, 25, 12, 7, 7]),
        ("bottleneck", [50, 25, 12, 7, 7, 7]),
        ("uniform", [100, 100, 100, 100, 7]),
        ("gradual", [77, 54, 31, 8, 7]),  # steps of (100 - 7) // 4
    ],
)
def test_an_mlp_has_the_widths_computed_by_hand(arch: str, expected: list[int]) -> None:
    plan = mlp.plan(mlp.MlpNetwork(arch=arch, input_features=100, output_features=7, depth=4))
    assert widths(plan, "Linear", "out_features") == expected
    assert widths(plan, "Linear", "in_features") == [100, *expected[:-1]]


@pytest.mark.parametrize(
    ("arch", "depth", "expected"),
    [
        ("pyramid", 4, [16, 32, 64, 128]),  # 16 * (256 / 16) ** (i / 4)
        ("uniform", 4, [16, 16, 16, 16]),
        ("gradual", 4, [16, 22, 32, 45]),  # half the growth: ** (i / 8)
        ("bottleneck", 5, [32, 16, 32, 64, 128]),  # twice the filters, then ** ((i - 1) / 4)
        ("bottleneck", 2, [32, 16]),
        ("hourglass", 4, [16, 64, 64, 16]),
        ("hourglass", 5, [16, 64, 101, 40, 16]),
    ],
)
def test_a_cnn_has_the_filters_computed_by_hand(arch: str, depth: int, expected: list[int]) -> None:
    network = {**CNN, "arch": arch, "depth": depth, "base_filters": 16, "max_filters": 256}
    plan = cnn.plan(cnn.CnnNetwork(**network))
    assert widths(plan, "Conv2d", "out_channels") == expected
    assert widths(plan, "Conv2d", "in_channels") == [3, *expected[:-1]]
    assert widths(plan, "Linear", "in_features") == expected[-1:]


def test_a_residual_cnn_has_the_layers_computed_by_hand() -> None:
    network = {
        **CNN,
        "arch": "residual",
        "depth": 8,
        "base_filters": 16,
        "max_filters": 256,
        "input_size": 32,
    }
    plan = cnn.plan(cnn.CnnNetwork(**network))
    # 4 blocks of two convolutions; every second halves the image; the shortcut convolves where channels change
    assert widths(plan, "Conv2d", "out_channels") == [16, 16, 16, 22, 22, 22, 32, 32, 32, 45, 45, 45]
    strides = [node.args.get("stride", 1) for node in plan.root.walk() if node.kind == "Conv2d"]
    assert strides == [1, 1, 1, 2, 1, 2, 1, 1, 1, 2, 1, 2]
    small = cnn.plan(cnn.CnnNetwork(**{**network, "input_size": 14}))  # the last block reaches 7 pixels
    assert widths(small, "Conv2d", "out_channels") == [16, 16, 16, 22, 22, 22]


def test_a_dense_cnn_has_the_layers_computed_by_hand() -> None:
    network = {**CNN, "arch": "dense", "depth": 12, "input_size": 32, "transition_every": 2}
    plan = cnn.plan(cnn.CnnNetwork(**network))
    block = [3, 35, 67, 99]  # each layer sees 32 more channels
    after = [65 + 32 * k for k in range(4)]  # the transition halves 131
    last = [193 + 32 * k for k in range(4)]  # a transition follows every second block
    assert widths(plan, "Conv2d", "in_channels") == [*block, 131, *after, *last]
    assert widths(plan, "Conv2d", "out_channels") == [*[32] * 4, 65, *[32] * 8]
    assert [node.kind for node in plan.root.walk()].count("AvgPool2d") == 1


@pytest.mark.parametrize(
    ("depth", "size", "expected"), [(12, 224, 3), (12, 13, 12), (29, 112, 8), (3, 2, 3), (1, 224, 1)]
)
def test_transitions_follow_the_rule_of_gpumemnet(depth: int, size: int, expected: int) -> None:
    assert cnn.transition_rule(depth, size) == expected


def test_a_cnn_pools_after_every_few_blocks() -> None:
    network = {**CNN, "depth": 4, "pooling": "avg", "pool_every": 2}
    kinds = [node.kind for node in cnn.plan(cnn.CnnNetwork(**network)).root.children]
    assert kinds == ["Sequential", "Sequential", "AvgPool2d", "Sequential", "Sequential", "AvgPool2d", "Sequential"]


def test_an_encoder_has_the_parameters_computed_by_hand() -> None:
    size, wide, words, length, classes = 8, 16, 11, 4, 2
    attention = 4 * size * size + 4 * size
    feed_forward = 2 * size * wide + wide + size
    expected = words * size + length * size + attention + feed_forward + 4 * size + (size + 1) * classes
    assert table_of("transformer", TRANSFORMER).parameters == expected
    decoder = expected - (size + 1) * classes + (size + 1) * words
    assert table_of("transformer", {**TRANSFORMER, "kind": "decoder"}).parameters == decoder
    pre = table_of("transformer", {**TRANSFORMER, "norm": "pre"}).parameters
    assert pre == expected + 2 * size  # one more norm, before the output


def test_an_encoder_decoder_has_the_parameters_computed_by_hand() -> None:
    size, wide, words, length = 8, 16, 11, 4
    attention, feed_forward = 4 * size * size + 4 * size, 2 * size * wide + wide + size
    tokens = 2 * (words + length) * size
    layers = (attention + feed_forward + 4 * size) + (2 * attention + feed_forward + 6 * size)
    network = {**TRANSFORMER, "kind": "encoder_decoder"}
    assert table_of("transformer", network).parameters == tokens + layers + (size + 1) * words
