"""Families: every combination of factors builds, and each network has exactly one spec."""

import json
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from small_networks import NETWORKS, SETUP, table_of

from vramcast.errors import UserError
from vramcast.jobs import subject
from vramcast.jobs.families import FAMILIES, cnn, make_spec, mlp, plan_of, shared_layers, template, transformer
from vramcast.jobs.spec import Spec
from vramcast.virtual_gpu.training.setup import TrainingSetup

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


# --- every combination builds -----------------------------------------------------------------------------------------

NORMS = {
    "mlp": mlp.NORMS,
    "cnn": shared_layers.IMAGE_NORMS,
    "template": shared_layers.IMAGE_NORMS,
    "transformer": transformer.NORMS,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_activation_with_every_norm_builds(family: str) -> None:
    for activation, norm, checkpointing in product(shared_layers.ACTIVATIONS, NORMS[family], (False, True)):
        network = {**NETWORKS[family], "activation": activation, "norm": norm}
        table = table_of(family, network, checkpointing=checkpointing)
        setup = replace(SETUP, checkpointing=checkpointing)
        module = subject.build_subject(plan_of(make_spec(family, network, setup)))
        assert sum(item.numel() for item in module.parameters()) == table.parameters


@pytest.mark.parametrize("family", ["mlp", "cnn", "template"])
@pytest.mark.parametrize("head", shared_layers.HEADS)
def test_every_head_is_the_last_layer(family: str, head: str) -> None:
    last = list(plan_of(make_spec(family, {**NETWORKS[family], "head": head}, SETUP)).root.walk())[-1]
    assert last.kind == (shared_layers.HEADS[head] or "Linear")


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_wraps_the_trunk_and_changes_no_layer(family: str) -> None:
    plain, wrapped = (table_of(family, NETWORKS[family], checkpointing=value) for value in (False, True))
    assert plain == wrapped
    plan = plan_of(make_spec(family, NETWORKS[family], replace(SETUP, checkpointing=True)))
    assert plan.root.kind == "CheckpointedSequential"


# --- specs ------------------------------------------------------------------------------------------------------------


def test_the_networks_in_this_file_set_every_factor() -> None:
    for name, family in FAMILIES.items():
        assert OTHERS[name].keys() == family.network.__dataclass_fields__.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_explicit_and_omitted_defaults_give_the_same_spec(family: str) -> None:
    made = make_spec(family, NETWORKS[family], SETUP)
    factors = vars(FAMILIES[family].network(**NETWORKS[family]))
    assert len(factors) > len(NETWORKS[family])
    explicit = make_spec(family, factors, TrainingSetup(batch_size=4, optimizer="Adam", accumulate=1))
    assert explicit == made
    assert explicit.id == made.id
    assert explicit.network.keys() == NETWORKS[family].keys()


def differ(family: str, network: dict[str, Any], others: dict[str, Any]) -> bool:
    specs = [make_spec(family, network, SETUP)]
    specs += [make_spec(family, {**network, name: value}, SETUP) for name, value in others.items()]
    return len({spec.id for spec in specs}) == len(specs) == len({spec.group for spec in specs})


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_differ_when_any_factor_differs(family: str) -> None:
    others = dict(OTHERS[family])
    if family == "cnn":  # no shape uses all factors: these are without pooling, or dense
        assert differ(family, {**NETWORKS[family], "pooling": "avg"}, {"pool_every": others.pop("pool_every")})
        assert differ(
            family, {**NETWORKS[family], "arch": "dense"}, {"transition_every": others.pop("transition_every")}
        )
    assert differ(family, NETWORKS[family], others)


CHOOSING = {
    "mlp": {"arch": list(mlp.WIDTHS)},
    "cnn": {"arch": [*cnn.FILTERS, "residual", "dense"], "pooling": cnn.POOLINGS},
    "template": {"template": list(template.TEMPLATES)},
    "transformer": {"kind": transformer.KINDS},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_omitted_factors_do_not_change_the_network(family: str) -> None:
    kind = FAMILIES[family]
    for values in product(*CHOOSING[family].values()):
        chosen = dict(zip(CHOOSING[family], values, strict=True))
        for name, value in OTHERS[family].items():
            network = {**NETWORKS[family], **OTHERS[family], "depth": 12, name: value, **chosen}
            network = {key: network[key] for key in OTHERS[family]}
            assert plan_of(make_spec(family, network, SETUP)) == kind.plan(kind.network(**network))


@pytest.mark.parametrize(
    ("family", "choice", "factors"),
    [
        ("cnn", {"arch": "dense"}, ["max_filters", "pooling", "pool_every"]),
        ("cnn", {"arch": "uniform"}, ["max_filters", "pool_every", "transition_every"]),
        ("cnn", {"arch": "residual", "pooling": "avg"}, ["transition_every"]),
        ("template", {"template": "resnet"}, ["pool_size", "classifier_features"]),
        ("template", {"template": "mobilenet"}, ["pool_size", "classifier_features"]),
        ("transformer", {"kind": "decoder"}, ["num_classes"]),
        ("transformer", {"kind": "encoder_decoder"}, ["num_classes"]),
    ],
)
def test_a_factor_without_effect_does_not_change_the_spec(
    family: str, choice: dict[str, Any], factors: list[str]
) -> None:
    base = {**NETWORKS[family], **choice}
    made = {make_spec(family, {**base, name: OTHERS[family][name]}, SETUP).id for name in factors}
    assert made == {make_spec(family, base, SETUP).id}


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
        "prefetched_batches": 1,
        "cudnn_benchmark": True,
        "channels_last": True,
        "zero_grad": "after_step",
        "parallel": "ddp(world_size=2)",
        "adapter": "lora(r=8)",
        "quantize": "nf4",
        "loss_form": "chunked=4",
        "liger": True,
        "compile": "model",
        "compile_loss": True,
        "memory_budget": 0.5,
        "mode": "generate",
        "new_tokens": 4,
        "cache": "static",
    }
    assert others.keys() == TrainingSetup.__dataclass_fields__.keys()
    setup = replace(SETUP, dry_run_batch_size=3)
    beside = {"quantize": ("adapter",), "memory_budget": ("compile",)}
    without_training = ("mode", "new_tokens", "cache")  # these go with no other option
    changes = [
        {name: value, **{other: others[other] for other in beside.get(name, ())}}
        for name, value in others.items()
        if name not in without_training
    ]
    specs = [make_spec("mlp", NETWORKS["mlp"], replace(setup, **change)) for change in [{}, *changes]]
    inference = {"batch_size": 4, "mode": others["mode"], "new_tokens": others["new_tokens"]}
    modes = [{**inference, "mode": "inference", "new_tokens": None}, inference, {**inference, "cache": others["cache"]}]
    specs += [make_spec("mlp", NETWORKS["mlp"], TrainingSetup(**mode)) for mode in modes]
    assert len({spec.id for spec in specs}) == len(specs) == len(others) + 1
    assert len({spec.group for spec in specs}) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"optimizer": "Adam"}, {"optimizer": "Adam()"}),
        ({"optimizer": "SGD(momentum=0.9,nesterov=True)"}, {"optimizer": "SGD( nesterov = True, momentum = .9 )"}),
        ({"optimizer": "Adam(lr=0.001)"}, {"optimizer": "Adam(lr=1e-3)"}),
        ({"dry_run_passes": 1}, {"dry_run_passes": 2}),
    ],
)
def test_equivalent_training_setups_give_the_same_spec(one: dict[str, Any], other: dict[str, Any]) -> None:
    specs = [make_spec("mlp", NETWORKS["mlp"], replace(SETUP, **changes)) for changes in (one, other)]
    assert specs[0] == specs[1]
    assert specs[0].id == specs[1].id


@pytest.mark.parametrize("family", FAMILIES)
def test_a_spec_round_trips_through_json(family: str) -> None:
    for network in (NETWORKS[family], OTHERS[family]):
        spec = make_spec(family, network, replace(SETUP, optimizer="SGD(momentum=0.9)", last_batch_size=1))
        read = Spec.from_json(json.loads(json.dumps(spec.to_json())))
        assert read == spec
        assert read.id == spec.id
        assert plan_of(read) == plan_of(spec)


def test_an_integer_in_place_of_a_float_gives_the_same_spec() -> None:
    made = [make_spec("transformer", {**NETWORKS["transformer"], "dropout": value}, SETUP) for value in (0, 0.0)]
    assert made[0].id == made[1].id


def test_stages_as_tuples_give_the_same_spec() -> None:
    stages = [[[4, 1], [8, 2]], ((4, 1), (8, 2))]
    made = [make_spec("template", {**NETWORKS["template"], "stages": value}, SETUP) for value in stages]
    assert made[0] == made[1]
    assert made[0].id == made[1].id


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        ("mlp", {"widht": 3}, r"expected the mlp network to have only \['activation', .*\], found \['widht'\]: remove"),
        ("mlp", {"arch": "spiral"}, r"expected network.arch to be one of \['pyramid', .*\], found 'spiral': choose"),
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
def test_invalid_factors_raise_one_sentence(family: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        make_spec(family, {**NETWORKS[family], **changes}, SETUP)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_factor_is_named(family: str) -> None:
    first, *rest = NETWORKS[family].items()
    with pytest.raises(UserError, match=rf"expected the {family} network to have \['{first[0]}'\], found .*: add them"):
        make_spec(family, dict(rest), SETUP)


def test_an_unknown_family_is_rejected() -> None:
    sentence = r"one of \['cnn', 'mlp', 'template', 'transformer'\], found 'gnn': did you mean cnn"
    with pytest.raises(UserError, match=sentence):
        make_spec("gnn", {}, SETUP)
    with pytest.raises(UserError, match=sentence):
        plan_of(Spec("gnn", {}, SETUP))


TOO_LARGE = [
    ("mlp", {"depth": 10**30}, "network.depth to be at most 10000, found 1(0){30}:"),
    ("mlp", {"depth": 10**9}, "network.depth"),
    ("mlp", {"input_features": 10**30}, f"network.input_features to be at most {2**30}"),
    ("cnn", {"depth": 10**9}, "network.depth"),
    ("cnn", {"kernel_size": 10**30}, "network.kernel_size"),
    ("transformer", {"layers": 10**9}, "network.layers"),
    ("template", {"stages": [[4, 10**9]]}, "network.blocks"),
    ("template", {"stages": [[4, 6_000], [4, 6_000]]}, "network.blocks"),
    ("template", {"stages": [[10**30, 1]]}, "network.stages"),
    ("template", {"padding": 10**30}, "network.padding"),
]


@pytest.mark.parametrize(("family", "factors", "message"), TOO_LARGE)
def test_impossible_counts_are_refused_before_anything_is_built(family, factors, message):
    with pytest.raises(UserError, match=f"expected {message}"):
        make_spec(family, {**NETWORKS[family], **factors}, SETUP)
