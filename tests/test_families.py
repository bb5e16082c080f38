"""Families: the classics have their published sizes, widths are those worked out by hand, specs are canonical."""

import json
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from dataset_builder import filters, subject
from dataset_builder.errors import UserError
from dataset_builder.families import FAMILIES, cnn, make_spec, mlp, pieces, plan_of, template, transformer
from dataset_builder.plan import Plan
from dataset_builder.schema import LayerTable, Spec, TrainingSetup

SETUP = TrainingSetup(batch_size=4)
NETWORKS: dict[str, dict[str, Any]] = {
    "mlp": {"arch": "pyramid", "input_features": 12, "output_features": 3, "depth": 2},
    "cnn": {
        "arch": "pyramid",
        "input_channels": 3,
        "input_size": 8,
        "num_classes": 5,
        "depth": 4,
        "base_filters": 4,
        "max_filters": 16,
    },
    "template": {"template": "vgg", "stages": [[4, 1], [8, 2]], "input_size": 16, "num_classes": 5},
    "transformer": {
        "kind": "encoder",
        "vocabulary": 11,
        "embedding_size": 8,
        "layers": 1,
        "heads": 2,
        "feed_forward_size": 16,
        "sequence_length": 4,
    },
}
# another legal value of every factor
OTHERS: dict[str, dict[str, Any]] = {
    "mlp": {
        "arch": "uniform",
        "input_features": 13,
        "output_features": 4,
        "depth": 3,
        "activation": "gelu",
        "norm": "layer",
        "dropout": 0.5,
        "head": "softmax",
    },
    "cnn": {
        "arch": "dense",
        "input_channels": 1,
        "input_size": 9,
        "num_classes": 6,
        "depth": 5,
        "base_filters": 5,
        "max_filters": 17,
        "kernel_size": 5,
        "activation": "tanh",
        "norm": "group",
        "dropout": 0.5,
        "pooling": "max",
        "pool_every": 3,
        "transition_every": 2,
        "head": "sigmoid",
    },
    "template": {
        "template": "resnet",
        "stages": [[4, 1], [8, 1]],
        "input_size": 17,
        "num_classes": 6,
        "input_channels": 1,
        "kernel_size": 1,
        "padding": 2,
        "pool_size": 3,
        "classifier_features": 16,
        "activation": "mish",
        "norm": "batch",
        "dropout": 0.5,
        "head": "softmax",
    },
    "transformer": {
        "kind": "decoder",
        "vocabulary": 12,
        "embedding_size": 10,
        "layers": 2,
        "heads": 1,
        "feed_forward_size": 17,
        "sequence_length": 5,
        "num_classes": 3,
        "dropout": 0.5,
        "activation": "elu",
        "norm": "pre",
    },
}


def table_of(family: str, network: dict[str, Any], **setup: Any) -> LayerTable:
    table = filters.check(make_spec(family, network, replace(SETUP, **setup)))
    assert isinstance(table, LayerTable), table
    return table


def widths(plan: Plan, kind: str, argument: str) -> list[int]:
    return [node.args[argument] for node in plan.root.walk() if node.kind == kind]


# --- templates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "norm", "parameters"),
    [("vgg", "none", 138_357_544), ("resnet", "batch", 11_689_512), ("mobilenet", "batch", 4_231_976)],
)
def test_the_classics_have_their_published_sizes(name: str, norm: str, parameters: int) -> None:
    """VGG-16, ResNet-18 and MobileNet v1 on ImageNet."""
    depth = len(template.SEEDS[name])
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


@pytest.mark.parametrize("name", template.SEEDS)
@pytest.mark.parametrize("order", template.ORDERS)
@pytest.mark.parametrize("stages", [1, 2, 7])
def test_every_order_keeps_all_stages(name: str, order: str, stages: int) -> None:
    found = template.mutate(name, stages, 1, order)
    assert sorted(found) == sorted(template.mutate(name, stages, 1, "forward"))
    assert len(found) == stages


def test_mutate_goes_beyond_the_template_by_its_last_stage() -> None:
    assert template.mutate("resnet", 6, 0, "forward")[3:] == [[512, 2]] * 3


def test_mutate_keeps_a_convolution_and_a_filter() -> None:
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
def test_mutate_refuses_what_it_does_not_know(arguments: Any, sentence: str) -> None:
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
def test_widths_of_an_mlp(arch: str, expected: list[int]) -> None:
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
def test_filters_of_a_cnn(arch: str, depth: int, expected: list[int]) -> None:
    network = {**NETWORKS["cnn"], "arch": arch, "depth": depth, "base_filters": 16, "max_filters": 256}
    plan = cnn.plan(cnn.CnnNetwork(**network))
    assert widths(plan, "Conv2d", "out_channels") == expected
    assert widths(plan, "Conv2d", "in_channels") == [3, *expected[:-1]]
    assert widths(plan, "Linear", "in_features") == expected[-1:]


def test_a_residual_cnn() -> None:
    network = {
        **NETWORKS["cnn"],
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
    small = cnn.plan(cnn.CnnNetwork(**{**network, "input_size": 14}))  # ends with the block that reaches 7 pixels
    assert widths(small, "Conv2d", "out_channels") == [16, 16, 16, 22, 22, 22]


def test_a_dense_cnn() -> None:
    network = {**NETWORKS["cnn"], "arch": "dense", "depth": 12, "input_size": 32, "transition_every": 2}
    plan = cnn.plan(cnn.CnnNetwork(**network))
    block = [3, 35, 67, 99]  # each layer sees 32 more channels
    after = [65 + 32 * k for k in range(4)]  # the transition halves 131
    last = [193 + 32 * k for k in range(4)]  # no transition after the second block of each two
    assert widths(plan, "Conv2d", "in_channels") == [*block, 131, *after, *last]
    assert widths(plan, "Conv2d", "out_channels") == [*[32] * 4, 65, *[32] * 8]
    assert [node.kind for node in plan.root.walk()].count("AvgPool2d") == 1


@pytest.mark.parametrize(
    ("depth", "size", "expected"), [(12, 224, 3), (12, 13, 12), (29, 112, 8), (3, 2, 3), (1, 224, 1)]
)
def test_the_transition_rule(depth: int, size: int, expected: int) -> None:
    assert cnn.transition_rule(depth, size) == expected


def test_a_pooled_cnn() -> None:
    network = {**NETWORKS["cnn"], "depth": 4, "pooling": "avg", "pool_every": 2}
    kinds = [node.kind for node in cnn.plan(cnn.CnnNetwork(**network)).root.children]
    assert kinds == ["Sequential", "Sequential", "AvgPool2d", "Sequential", "Sequential", "AvgPool2d", "Sequential"]


def test_a_transformer_encoder_by_hand() -> None:
    size, wide, words, length, classes = 8, 16, 11, 4, 2
    attention = 4 * size * size + 4 * size
    feed_forward = 2 * size * wide + wide + size
    expected = words * size + length * size + attention + feed_forward + 4 * size + (size + 1) * classes
    assert table_of("transformer", NETWORKS["transformer"]).parameters == expected
    decoder = expected - (size + 1) * classes + (size + 1) * words
    assert table_of("transformer", {**NETWORKS["transformer"], "kind": "decoder"}).parameters == decoder
    pre = table_of("transformer", {**NETWORKS["transformer"], "norm": "pre"}).parameters
    assert pre == expected + 2 * size  # one norm more, before the output


def test_an_encoder_decoder_by_hand() -> None:
    size, wide, words, length = 8, 16, 11, 4
    attention, feed_forward = 4 * size * size + 4 * size, 2 * size * wide + wide + size
    tokens = 2 * (words + length) * size
    layers = (attention + feed_forward + 4 * size) + (2 * attention + feed_forward + 6 * size)
    network = {**NETWORKS["transformer"], "kind": "encoder_decoder"}
    assert table_of("transformer", network).parameters == tokens + layers + (size + 1) * words


# --- every combination builds -----------------------------------------------------------------------------------------

NORMS = {"mlp": mlp.NORMS, "cnn": pieces.IMAGE_NORMS, "template": pieces.IMAGE_NORMS, "transformer": transformer.NORMS}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_activation_with_every_norm_builds(family: str) -> None:
    for activation, norm, checkpointing in product(pieces.ACTIVATIONS, NORMS[family], (False, True)):
        network = {**NETWORKS[family], "activation": activation, "norm": norm}
        table = table_of(family, network, checkpointing=checkpointing)
        setup = replace(SETUP, checkpointing=checkpointing)
        module = subject.build_subject(plan_of(make_spec(family, network, setup)))
        assert sum(item.numel() for item in module.parameters()) == table.parameters


@pytest.mark.parametrize("family", ["mlp", "cnn", "template"])
@pytest.mark.parametrize("head", pieces.HEADS)
def test_every_head_ends_the_network(family: str, head: str) -> None:
    last = list(plan_of(make_spec(family, {**NETWORKS[family], "head": head}, SETUP)).root.walk())[-1]
    assert last.kind == (pieces.HEADS[head] or "Linear")


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_wraps_the_trunk_and_changes_no_layer(family: str) -> None:
    plain, wrapped = (table_of(family, NETWORKS[family], checkpointing=value) for value in (False, True))
    assert plain == wrapped
    plan = plan_of(make_spec(family, NETWORKS[family], replace(SETUP, checkpointing=True)))
    assert plan.root.kind == "CheckpointedSequential"


# --- specs ------------------------------------------------------------------------------------------------------------


def test_the_samples_of_this_file_name_every_factor() -> None:
    for name, family in FAMILIES.items():
        assert OTHERS[name].keys() == family.network.__dataclass_fields__.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_default_said_or_left_out_is_one_spec(family: str) -> None:
    made = make_spec(family, NETWORKS[family], SETUP)
    factors = vars(FAMILIES[family].network(**NETWORKS[family]))
    assert len(factors) > len(NETWORKS[family])
    said = make_spec(family, factors, TrainingSetup(batch_size=4, optimizer="Adam", accumulate=1))
    assert said == made
    assert said.id == made.id
    assert said.network.keys() == NETWORKS[family].keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_differ_when_any_factor_differs(family: str) -> None:
    specs = [make_spec(family, NETWORKS[family], SETUP)]
    for name, value in OTHERS[family].items():
        specs.append(make_spec(family, {**NETWORKS[family], name: value}, SETUP))
    assert len({spec.id for spec in specs}) == len(specs)
    assert len({spec.group for spec in specs}) == len(specs)


def test_ids_differ_when_the_training_differs_and_groups_do_not() -> None:
    others: dict[str, Any] = {
        "batch_size": 5,
        "last_batch_size": 2,
        "loss": "mse",
        "optimizer": "SGD",
        "implementation": "single",
        "dtype": "bf16",
        "autocast": "fp16",
        "accumulate": 2,
        "checkpointing": True,
        "dry_run_batch_size": 2,
        "dry_run_passes": 2,
    }
    assert others.keys() == TrainingSetup.__dataclass_fields__.keys()
    specs = [make_spec("mlp", NETWORKS["mlp"], SETUP)]
    specs += [make_spec("mlp", NETWORKS["mlp"], replace(SETUP, **{name: value})) for name, value in others.items()]
    assert len({spec.id for spec in specs}) == len(specs)
    assert len({spec.group for spec in specs}) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_spec_survives_json(family: str) -> None:
    for network in (NETWORKS[family], OTHERS[family]):
        spec = make_spec(family, network, replace(SETUP, optimizer="SGD(momentum=0.9)", last_batch_size=1))
        read = Spec.from_json(json.loads(json.dumps(spec.to_json())))
        assert read == spec
        assert read.id == spec.id
        assert plan_of(read) == plan_of(spec)


def test_a_whole_number_for_a_fraction_is_the_same_spec() -> None:
    made = [make_spec("transformer", {**NETWORKS["transformer"], "dropout": value}, SETUP) for value in (0, 0.0)]
    assert made[0].id == made[1].id


def test_stages_as_tuples_are_the_same_spec() -> None:
    stages = [[[4, 1], [8, 2]], ((4, 1), (8, 2))]
    made = [make_spec("template", {**NETWORKS["template"], "stages": value}, SETUP) for value in stages]
    assert made[0] == made[1]
    assert made[0].id == made[1].id


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        ("mlp", {"widht": 3}, r"expected the mlp network to have only \['activation', .*\], found \['widht'\]: remove"),
        ("mlp", {"arch": "spiral"}, r"expected network.arch to be one of \['pyramid', .*\], found 'spiral': change it"),
        ("mlp", {"depth": 0}, "expected network.depth to be a whole number from 1, found 0: change it"),
        ("mlp", {"depth": 2.0}, "expected network.depth to be a whole number from 1, found 2.0"),
        ("mlp", {"depth": True}, "expected network.depth to be a whole number from 1, found True"),
        ("mlp", {"depth": "2"}, "expected network.depth to be a whole number from 1, found '2'"),
        ("mlp", {"dropout": 1.0}, "expected network.dropout to be a number from 0 to below 1, found 1.0"),
        ("mlp", {"dropout": float("nan")}, "expected network.dropout to be a number from 0 to below 1, found nan"),
        ("mlp", {"activation": "relu6"}, "expected network.activation to be one of .*, found 'relu6'"),
        ("mlp", {"norm": "group"}, r"expected network.norm to be one of \['none', 'batch', 'layer'\], found 'group'"),
        ("mlp", {"head": "argmax"}, "expected network.head to be one of"),
        ("cnn", {"arch": "unet"}, "expected network.arch to be one of .*'dense'.*, found 'unet'"),
        ("cnn", {"pooling": "min"}, r"expected network.pooling to be one of \['none', 'max', 'avg'\], found 'min'"),
        ("cnn", {"transition_every": 0}, "expected network.transition_every to be a whole number from 1, found 0"),
        ("cnn", {"norm": "layer"}, "expected network.norm to be one of"),
        ("template", {"template": "alexnet"}, "expected network.template to be one of"),
        ("template", {"padding": -1}, "expected network.padding to be a whole number from 0, found -1"),
        ("template", {"stages": []}, r"expected network.stages as \[\[filters, blocks\], ...\], found \[\]: write it"),
        ("template", {"stages": [[4]]}, r"expected network.stages as .*, found \[\[4\]\]"),
        ("template", {"stages": [4, 2]}, r"expected network.stages as .*, found \[4, 2\]"),
        ("template", {"stages": 4}, "expected network.stages as .*, found 4"),
        ("template", {"stages": "4x2"}, "expected network.stages as .*, found '4x2'"),
        ("template", {"stages": ["42"]}, "expected network.stages"),
        ("template", {"stages": [[4, 0]]}, "expected network.stages to be a whole number from 1, found 0"),
        ("transformer", {"kind": "hybrid"}, "expected network.kind to be one of"),
        ("transformer", {"heads": None}, "expected network.heads to be a whole number from 1, found None"),
    ],
)
def test_bad_factors_are_refused_in_a_sentence(family: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        make_spec(family, {**NETWORKS[family], **changes}, SETUP)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_factor_is_named(family: str) -> None:
    first, *rest = NETWORKS[family].items()
    with pytest.raises(UserError, match=rf"expected the {family} network to have \['{first[0]}'\], found .*: add them"):
        make_spec(family, dict(rest), SETUP)


def test_an_unknown_family_is_refused() -> None:
    sentence = r"one of \['cnn', 'mlp', 'template', 'transformer'\], found 'gnn': choose one"
    with pytest.raises(UserError, match=sentence):
        make_spec("gnn", {}, SETUP)
    with pytest.raises(UserError, match=sentence):
        plan_of(Spec("gnn", {}, SETUP))
