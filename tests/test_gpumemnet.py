"""Every file name in the public GPUMemNet data gives a network with exactly the published layers and parameters."""

import ast
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from math import prod
from typing import Any

import pytest
import torch

from vramcast.errors import UserError
from vramcast.jobs import filters, subject
from vramcast.jobs.analysis.layers import layer_table
from vramcast.jobs.families import plan_of
from vramcast.jobs.families.gpumemnet import spec_of_filename
from vramcast.jobs.spec import LayerTable, Spec
from vramcast.virtual_gpu.training.setup import TrainingSetup

BUILT_ROWS = 30  # rows of each file that are built as modules

Entry = tuple[str, int, int]
Reader = Callable[[str], list[dict[str, str]]]

# Names of layers in the data set; activations have the names of their classes.
NAMES = {
    "Linear": "linear",
    "Conv2d": "conv2d",
    "BatchNorm1d": "batch_normalization",
    "BatchNorm2d": "batchnorm2d",
    "Dropout": "dropout",
    "AdaptiveAvgPool2d": "adaptive_avg_pool2d",
}
UNLISTED = {"mlp": {"Flatten"}, "cnn": {"Flatten", "AvgPool2d", "Identity", "Sigmoid"}}


def published(row: dict[str, str]) -> list[Entry]:
    entries: list[Entry] = ast.literal_eval(row["Activations-Params"])
    return entries


def listed(family: str, table: LayerTable) -> list[Entry]:
    """Return the table in the form of the data set: without functions and without weights of PReLU."""
    names = {**NAMES, "Softmax": "Softmax" if family == "mlp" else "softmax"}
    return [
        (names.get(item.kind, item.kind), prod(item.output_shape), 0 if item.kind == "PReLU" else item.parameters)
        for item in table.layers
        if not item.functional and item.kind not in UNLISTED[family]
    ]


def table_of(spec: Spec, used: Counter[str] | None = None) -> LayerTable:
    """Return the table of the filter; if a norm rejects a last batch of one sample, return it without that batch."""
    table = filters.check(spec)
    if isinstance(table, filters.Rejected):
        assert spec.training.last_batch_size == 1, table
        assert spec.network["norm"] == "batch", table
        assert table.reason.startswith("BatchNorm1d at '0.1': expected N * prod(L) > 1, found L=(), N=1")
        if used is not None:
            used["last batch of one sample"] += 1
        table = filters.check(replace(spec, training=replace(spec.training, last_batch_size=None)))
    assert isinstance(table, LayerTable)
    return table


def agrees(table: LayerTable, family: str, row: dict[str, str]) -> bool:
    entries = published(row)
    total = int(row["Total Parameters"])
    weights_of_prelu = table.counts.get("PReLU", 0)
    return listed(family, table) == entries and total == table.parameters - weights_of_prelu


def check_rows(rows: list[dict[str, str]], family: str, hidden: dict[str, list[dict[str, Any]]]) -> Counter[str]:
    """Compare every row; `hidden` lists, by the name of the exception, factors that are not in the file name."""
    used: Counter[str] = Counter()
    for row in rows:
        spec = spec_of_filename(row["Filename"])
        if not published(row):
            assert nothing_was_parsed(spec), row["Filename"]
            used["empty list"] += 1
            continue
        guesses = [("as named", {}), *((rule, guess) for rule, guesses in hidden.items() for guess in guesses)]
        for rule, guess in guesses:
            if guess and not may_hide(rule, spec):
                continue
            table = table_of(spec_of_filename(row["Filename"], guess), used)
            if agrees(table, family, row):
                used[rule] += 1
                break
        else:
            pytest.fail(f"{row['Filename']}: {listed(family, table_of(spec))} is not what was published")
    return used


def nothing_was_parsed(spec: Spec) -> bool:
    """Return whether a row has no layers: its image is too small for the generator, or it has no convolution block."""
    size, arch, depth = (spec.network[key] for key in ("input_size", "arch", "depth"))
    return size <= 6 or (arch == "residual" and depth == 1) or (arch == "dense" and depth < 4)


def may_hide(rule: str, spec: Spec) -> bool:
    if rule == "transition every 5":
        return spec.network["arch"] == "dense"
    return spec.network["output_features"] == 1


def test_mlps_with_relu_have_the_published_layers(public_rows: Reader) -> None:
    used = check_rows(public_rows("gpumemnet/mlp_data_step1.csv"), "mlp", {})
    assert set(used) == {"as named"}


def test_mlps_with_norms_and_dropout_have_the_published_layers(public_rows: Reader, record_property: Any) -> None:
    used = check_rows(
        public_rows("gpumemnet/mlp_data_step2.csv"), "mlp", {"secret head": [{"head": "sigmoid"}, {"head": "identity"}]}
    )
    record_property("exceptions", dict(used))
    assert set(used) == {"as named", "secret head", "last batch of one sample"}
    assert used["secret head"] + used["last batch of one sample"] < 0.03 * used.total()


def test_cnns_have_the_published_layers(public_rows: Reader, record_property: Any) -> None:
    used = check_rows(
        public_rows("gpumemnet/cnn_data_step1.csv"), "cnn", {"transition every 5": [{"transition_every": 5}]}
    )
    record_property("exceptions", dict(used))
    assert set(used) == {"as named", "transition every 5", "empty list"}
    assert used["transition every 5"] + used["empty list"] < 0.15 * used.total()


def test_transformers_have_the_published_layers(public_rows: Reader) -> None:
    columns = {
        "Seq Length": "sequence_length",
        "Embedding Size": "embedding_size",
        "Num Layers": "layers",
        "Num Heads": "heads",
    }
    for row in public_rows("gpumemnet/transformer_data_sample.csv"):
        spec = spec_of_filename(row["Filename"])
        table = table_of(spec)
        size = spec.network["embedding_size"]
        projection = size * size + size  # the data set counts only the output projection of an attention layer
        seen = {"Embedding": 1, "Linear": 1, "MultiheadAttention": 0}
        accumulated = sum(item.parameters * seen.get(item.kind, 0) for item in table.layers)
        accumulated += projection * table.counts["MultiheadAttention"]
        assert accumulated == int(row["Accumulated Params"])
        assert {key: int(row[key]) for key in columns} == {key: spec.network[name] for key, name in columns.items()}
        assert spec.training.batch_size == int(row["Batch Size"])


@pytest.mark.parametrize(
    "name", ["mlp_data_step1.csv", "mlp_data_step2.csv", "cnn_data_step1.csv", "transformer_data_sample.csv"]
)
def test_modules_have_the_parameters_of_their_tables(public_rows: Reader, name: str) -> None:
    rows = public_rows(f"gpumemnet/{name}")
    for row in islice(rows, 0, None, max(1, len(rows) // BUILT_ROWS)):
        spec = spec_of_filename(row["Filename"])
        plan = plan_of(spec)
        module = subject.build_subject(plan)
        table = table_of(spec)
        assert sum(item.numel() for item in module.parameters()) == table.parameters
        if spec.family != "transformer":  # slow on the meta device; tests/test_layers.py has small ones
            with torch.no_grad():
                assert layer_table(module, subject.make_inputs(plan, 2)).layers == table.layers


# --- invented file names ------------------------------------------------------------------------------------------


def test_the_file_name_of_an_mlp_is_parsed() -> None:
    spec = spec_of_filename("input:40_output:3_depth:2_arch:gradual_batch:100.out")
    assert spec.family == "mlp"
    assert spec.network == {"arch": "gradual", "input_features": 40, "output_features": 3, "depth": 2}
    # 4,096 samples leave 96; a layer summary ran with two
    assert spec.training == TrainingSetup(batch_size=100, last_batch_size=96, dry_run_batch_size=2)
    assert spec_of_filename("input:40_output:3_depth:2_arch:gradual_batch:64.out").training.last_batch_size is None


def test_the_file_name_of_an_mlp_with_norm_and_dropout_is_parsed() -> None:
    name = "input:40_output:{}_depth:2_arch:pyramid_batch:64_act:leaky_relu_dropout:0.25_dropout:{}_batchnorm:{}.out"
    spec = spec_of_filename(name.format(3, True, True))
    assert spec.network["activation"] == "leaky_relu"
    assert (spec.network["dropout"], spec.network["norm"], spec.network["head"]) == (0.25, "batch", "softmax")
    assert not spec_of_filename(name.format(3, False, False)).network.keys() & {"dropout", "norm"}
    single = spec_of_filename(name.format(1, True, True))
    assert single.training.loss == "bce_with_logits"
    assert "head" not in single.network
    assert spec_of_filename(name.format(1, True, True), {"head": "sigmoid"}).network["head"] == "sigmoid"


def test_the_file_name_of_a_cnn_is_parsed() -> None:
    name = (
        "input_channels:1_num_classes:{}_depth:8_arch:dense_base_filters:20_batch:10_input_size:50"
        "_act:swish_dropout:1e-1_dropout:True_batchnorm:False.out"
    )
    spec = spec_of_filename(name.format(7))
    assert spec.network == {
        "arch": "dense",
        "input_channels": 1,
        "input_size": 50,
        "num_classes": 7,
        "depth": 8,
        "base_filters": 20,
        "activation": "swish",
        "dropout": 0.1,
        "head": "softmax",
    }
    assert spec.training.last_batch_size == 6
    assert spec_of_filename(name.format(7), {"transition_every": 5}).network["transition_every"] == 5
    single = spec_of_filename(name.format(1))
    assert (single.network["head"], single.training.loss) == ("sigmoid", "bce")
    assert isinstance(filters.check(single), LayerTable)


def test_the_file_name_of_a_transformer_is_parsed() -> None:
    spec = spec_of_filename(
        "num_classes:9_embedding_size:32_num_layers:2_num_heads:4_ff_hidden_size:70_dropout_rate:0.1234"
        "_seq_length:16_input_size:1000_num_samples:50_batch_size:8.out"
    )
    assert spec.network["vocabulary"] == 1000
    assert spec.network["kind"] == "encoder"
    assert spec.training == TrainingSetup(batch_size=8, last_batch_size=2, dry_run_batch_size=8, dry_run_passes=2)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "resnet50_8.out",
            r"such as input:8_output:8_depth:8_arch:uniform_batch:8.out, found 'resnet50_8.out': check it",
        ),
        ("", "expected a file name of GPUMemNet"),
        ("input:40_output:3_depth:2_arch:gradual_batch:100.err", "expected a file name of GPUMemNet"),
        ("input:-4_output:3_depth:2_arch:gradual_batch:100.out", "expected a file name of GPUMemNet"),
        ("input:40_output:3_depth:2_arch:gradual_batch:0.out", "whole number from 1, found 0"),
        ("input:40_output:3_depth:0_arch:gradual_batch:8.out", "expected network.depth .* from 1, found 0"),
        ("input:40_output:3_depth:2_arch:spiral_batch:8.out", "expected network.arch .*, found 'spiral'"),
        (
            "input:4_output:3_depth:2_arch:pyramid_batch:6_act:relu_dropout:0.1.2_dropout:True_batchnorm:True.out",
            "expected a file name of GPUMemNet",
        ),
        (
            "input:4_output:3_depth:2_arch:pyramid_batch:6_act:relu_dropout:0.1_dropout:yes_batchnorm:no.out",
            "expected a file name of GPUMemNet",
        ),
    ],
)
def test_other_file_names_raise_one_sentence(name: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        spec_of_filename(name)


def test_an_unknown_hidden_factor_is_rejected() -> None:
    with pytest.raises(UserError, match=r"found \['transition_evry'\]"):
        spec_of_filename("input:40_output:3_depth:2_arch:gradual_batch:100.out", {"transition_evry": 5})
