"""The layer table: the filter computes from shapes what hooks record, and any module has one."""

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vramcast.jobs import filters, subject
from vramcast.jobs.analysis.layers import layer_table
from vramcast.jobs.families import cnn, make_spec, mlp, plan_of, shared_layers, template, transformer
from vramcast.jobs.spec import LayerRecord, LayerTable
from vramcast.virtual_gpu.training.setup import TrainingSetup

ACTIVATIONS = list(shared_layers.ACTIVATIONS)
LEVELS: dict[str, dict[str, list[Any]]] = {
    "mlp": {
        "arch": list(mlp.WIDTHS),
        "input_features": [1, 7, 16],
        "output_features": [1, 5, 20],
        "depth": [1, 2, 4],
        "activation": ACTIVATIONS,
        "norm": list(mlp.NORMS),
        "dropout": [0.0, 0.3],
        "head": list(shared_layers.HEADS),
    },
    "cnn": {
        "arch": [*cnn.FILTERS, "residual", "dense"],
        "input_channels": [1, 3],
        "input_size": [4, 9, 16],
        "num_classes": [1, 4],
        "depth": [1, 3, 8, 9],
        "base_filters": [2, 5],
        "max_filters": [4, 16],
        "kernel_size": [1, 3, 3, 4],
        "activation": ACTIVATIONS,
        "norm": list(shared_layers.IMAGE_NORMS),
        "dropout": [0.0, 0.3],
        "pooling": list(cnn.POOLINGS),
        "pool_every": [2, 3],
        "transition_every": [None, 1, 2],
        "head": list(shared_layers.HEADS),
    },
    "template": {
        "template": list(template.TEMPLATES),
        "stages": [[[4, 1]], [[4, 2], [8, 1]], [[8, 1], [4, 3], [4, 1]]],
        "input_size": [16, 33],
        "num_classes": [3],
        "kernel_size": [1, 3, 3],
        "pool_size": [1, 2],
        "classifier_features": [6],
        "activation": ACTIVATIONS,
        "norm": list(shared_layers.IMAGE_NORMS),
        "dropout": [0.0, 0.3],
        "head": list(shared_layers.HEADS),
    },
    "transformer": {
        "kind": list(transformer.KINDS),
        "vocabulary": [3, 11],
        "embedding_size": [4, 8],
        "layers": [1, 2],
        "heads": [1, 2],
        "feed_forward_size": [3, 9],
        "sequence_length": [1, 5],
        "num_classes": [2, 3],
        "dropout": [0.0, 0.1],
        "activation": ACTIVATIONS,
        "norm": list(transformer.NORMS),
    },
}


def drawn(family: str, count: int) -> list[dict[str, Any]]:
    """Yield networks in which every level of every factor occurs about equally often."""
    draw = random.Random(family)
    columns = {name: [levels[i % len(levels)] for i in range(count)] for name, levels in LEVELS[family].items()}
    for column in columns.values():
        draw.shuffle(column)
    return [{name: column[i] for name, column in columns.items()} for i in range(count)]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("family", "count"), [("mlp", 60), ("cnn", 80), ("template", 40), ("transformer", 50)])
def test_the_filter_and_the_module_have_the_same_table(family: str, count: int, checkpointing: bool) -> None:
    accepted = 0
    for network in drawn(family, count):
        spec = make_spec(family, network, TrainingSetup(batch_size=3, checkpointing=checkpointing))
        table = filters.check(spec)
        if isinstance(table, filters.Rejected):
            continue
        accepted += 1
        plan = plan_of(spec)
        module = subject.build_subject(plan)
        seen = layer_table(module, subject.make_inputs(plan, 3))
        assert table.layers == seen.layers, spec
        assert Counter(table.trainable_shapes) == Counter(seen.trainable_shapes), spec
        assert table.input_elements == seen.input_elements, spec
        assert table.parameters == sum(item.numel() for item in module.parameters()), spec
    assert accepted >= 0.7 * count


def test_the_table_does_not_depend_on_the_batch() -> None:
    for family in LEVELS:
        for network in drawn(family, 20):
            specs = [make_spec(family, network, TrainingSetup(batch_size=size)) for size in (2, 7)]
            tables = [filters.check(spec) for spec in specs]
            if isinstance(tables[0], LayerTable):
                assert tables[0] == tables[1]
                plan = plan_of(specs[0])
                assert layer_table(subject.build_subject(plan), subject.make_inputs(plan, 7)).layers == tables[0].layers


def test_all_batches_of_a_training_setup_give_the_same_table() -> None:
    setup = TrainingSetup(batch_size=16)
    network = {"arch": "uniform", "input_features": 8, "output_features": 2, "depth": 2, "norm": "batch"}
    table = filters.check(make_spec("mlp", network, setup))
    assert isinstance(table, LayerTable)
    assert table == filters.check(make_spec("mlp", network, replace(setup, last_batch_size=3, dry_run_batch_size=2)))


# --- other modules -----------------------------------------------------------------------------------------------


def table_of(module: nn.Module, *shapes: tuple[int, ...]) -> LayerTable:
    table = layer_table(module.to("meta"), [torch.randn(shape, device="meta") for shape in shapes])
    assert unhooked(module)
    assert table.parameters == sum(item.numel() for item in module.parameters())
    return table


def unhooked(module: nn.Module) -> bool:
    return not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def kinds(table: LayerTable) -> list[tuple[str, int, int]]:
    return [(record.kind, record.activations, record.parameters) for record in table.layers]


def test_a_single_layer_has_one_row() -> None:
    table = table_of(nn.Linear(3, 5), (2, 3))
    assert table.layers == (LayerRecord("", "Linear", (5,), 5, 20),)
    assert table.trainable_shapes == ((5, 3), (5,))
    assert table.input_elements == 3
    assert table.counts == {"Linear": 1}


def test_parameters_of_a_shared_layer_are_counted_once() -> None:
    shared = nn.Linear(4, 4)
    table = table_of(nn.Sequential(shared, nn.ReLU(), shared), (2, 4))
    assert kinds(table) == [("Linear", 4, 20), ("ReLU", 4, 0), ("Linear", 4, 0)]
    assert table.trainable_shapes == ((4, 4), (4,))


def test_tied_weights_are_counted_once() -> None:
    embedding, head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
    network = nn.Sequential(embedding, head).to("meta")
    head.weight = embedding.weight
    table = layer_table(network, [torch.zeros(2, 5, dtype=torch.long, device="meta")])
    assert kinds(table) == [("Embedding", 20, 36), ("Linear", 45, 0)]
    assert table.trainable_shapes == ((9, 4),)


class ClassToken(nn.Module):
    """Owns a parameter and has a child."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 4))
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        token = self.token.expand(x.shape[0], -1, -1)
        return self.mix(torch.cat([token, x], dim=1))


def test_parameters_of_a_module_with_children_are_recorded() -> None:
    table = table_of(nn.Sequential(ClassToken()), (2, 3, 4))
    assert table.layers == (
        LayerRecord("0", "cat", (4, 4), 16, 0, functional=True),
        LayerRecord("0.mix", "Linear", (4, 4), 16, 20),
        LayerRecord("0", "ClassToken", (), 0, 4),
    )
    assert table.counts == {"Linear": 1, "ClassToken": 1}


class Tokens(nn.Module):
    """A leaf whose output is its own parameter, repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.token.expand(x.shape[0], -1, -1)


def test_an_output_in_the_storage_of_a_parameter_has_no_activations() -> None:
    assert kinds(table_of(Tokens(), (2, 3))) == [("Tokens", 0, 12)]


class Functions(nn.Module):
    """Functions between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(x))
        z = y + self.second(y)
        z += 1  # in place: no storage
        z.mul_(2)
        return torch.cat([z.view(-1, 3, 2).transpose(1, 2).flatten(1), y], dim=1).softmax(-1)


def test_functions_between_layers_are_rows_of_the_module_that_calls_them() -> None:
    table = table_of(nn.Sequential(Functions()), (2, 4))
    assert [(record.name, record.kind, record.activations, record.functional) for record in table.layers] == [
        ("0.first", "Linear", 6, False),
        ("0", "relu", 6, True),
        ("0.second", "Linear", 6, False),
        ("0", "add", 6, True),
        ("0", "flatten", 6, True),  # copies, because its input is transposed
        ("0", "cat", 12, True),
        ("0", "softmax", 12, True),
    ]
    assert table.counts == {"Linear": 2}


def test_in_place_functions_and_views_have_no_activations() -> None:
    network = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Identity(), nn.Dropout(0.0), nn.Unflatten(1, (2, 4))
    )
    table = table_of(network, (5, 1, 4, 4))
    assert [item.activations for item in table.layers] == [8, 0, 0, 0, 0, 0]
    assert [item.output_shape for item in table.layers] == [(2, 2, 2), (2, 2, 2), (8,), (8,), (8,), (2, 4)]


class SplitInThree(nn.Module):
    """A leaf that returns three views of one new storage, and a tensor twice."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        q, k, v = torch.cat([x, x, x], dim=-1).chunk(3, dim=-1)
        return {"q": q, "more": [k, (v, v)], "size": 3, "nothing": None}


def test_views_of_one_storage_are_counted_once() -> None:
    table = table_of(SplitInThree(), (2, 5))
    assert table.layers == (LayerRecord("", "SplitInThree", (5,), 15, 0),)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_an_lstm_is_one_layer(bidirectional: bool) -> None:
    lstm = nn.LSTM(4, 6, num_layers=2, batch_first=True, bidirectional=bidirectional)
    table = table_of(lstm, (3, 7, 4))
    ways = 1 + bidirectional
    # the output of every position, and the last hidden and cell state of each layer and direction
    assert [(item.kind, item.output_shape) for item in table.layers] == [("LSTM", (7, 6 * ways))]
    assert table.activations >= 7 * 6 * ways + 2 * 2 * ways * 6


def test_attention_is_one_layer_with_its_projection() -> None:
    class SelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.attention(query=x, key=x, value=x, need_weights=False)[0]
            return out

    table = table_of(SelfAttention(), (2, 5, 8))
    assert table.layers == (LayerRecord("attention", "MultiheadAttention", (5, 8), 40, 4 * 8 * 8 + 4 * 8),)


class TakesKeywords(nn.Module):
    """Calls its layer with keywords and returns a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Scaled()

    def forward(self, x: Tensor) -> Mapping[str, Any]:
        return {"out": self.part(value=x, scale=2.0), "again": self.part(scale=1.0, value=x)}


class Scaled(nn.Module):
    def forward(self, value: Tensor, scale: float) -> tuple[Tensor, None]:
        return (value if scale == 1.0 else value * scale), None


def test_keywords_and_nested_outputs_are_recorded() -> None:
    assert kinds(table_of(TakesKeywords(), (2, 5))) == [("Scaled", 5, 0), ("Scaled", 0, 0)]


class UsesWeightAlone(nn.Module):
    """Uses a layer's weight without calling the layer, as tied output layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.other = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.inner(x), self.other.weight)


def test_a_weight_that_is_used_without_its_layer_is_recorded() -> None:
    table = table_of(UsesWeightAlone(), (2, 4))
    assert table.layers == (
        LayerRecord("inner", "Linear", (4,), 4, 20),
        LayerRecord("", "linear", (3,), 3, 0, functional=True),
        LayerRecord("other", "Linear", (), 0, 15),
    )


def test_frozen_parameters_are_counted_and_not_trainable() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    network[0].requires_grad_(False)
    table = table_of(network, (2, 4))
    assert table.parameters == 30
    assert table.trainable_shapes == ((2, 4), (2,))


def test_nested_inputs_are_counted() -> None:
    class Sum(nn.Module):
        def forward(self, pair: list[Tensor], third: Tensor) -> Tensor:
            return pair[0] + pair[1] + third

    x = torch.zeros(2, 5, device="meta")
    table = layer_table(nn.Sequential(nn.Identity(), nn.Linear(5, 1)).to("meta"), [x])
    assert table.input_elements == 5
    assert layer_table(Sum(), [[x, x], x]).input_elements == 15


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("no forward today")


def test_hooks_are_removed_when_the_forward_pass_raises() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), Fails())).to("meta")
    with pytest.raises(RuntimeError, match="no forward today"):
        layer_table(network, [torch.zeros(2, 4, device="meta")])
    assert unhooked(network)
    y = torch.zeros(2, 4) + 1  # functions are not recorded either
    assert y.sum() == 8


def test_hooks_of_the_caller_are_kept() -> None:
    network = nn.Linear(4, 4).to("meta")
    calls: list[str] = []
    network.register_forward_hook(lambda *_: calls.append("called"))
    layer_table(network, [torch.zeros(2, 4, device="meta")])
    assert calls == ["called"]
    assert len(network._forward_hooks) == 1


def test_a_run_on_the_cpu_gives_the_same_table() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    x = torch.zeros(2, 1, 4, 4)
    on_cpu = layer_table(network, [x])
    assert on_cpu == layer_table(network.to("meta"), [x.to("meta")])
    assert on_cpu.activations == 8 * 3 + 3
    assert sum(map(prod, on_cpu.trainable_shapes)) == on_cpu.parameters


class _RotaryEmbedding(nn.Module):
    """Switches autocast off for the device of its input, as networks of transformers 4.51 do."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(device_type=x.device.type, enabled=False):
            return x.float().cos()


def test_a_network_that_names_its_device_for_autocast_has_a_table() -> None:
    table = table_of(nn.Sequential(nn.Linear(4, 6), _RotaryEmbedding()), (2, 4))
    assert kinds(table) == [("Linear", 6, 30), ("_RotaryEmbedding", 6, 0)]
    with pytest.raises(RuntimeError, match="unsupported scalarType"), torch.autocast("meta", enabled=False):
        pytest.fail("torch allows it, so that nothing needs to be replaced")
