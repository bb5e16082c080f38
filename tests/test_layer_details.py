"""The fields of a layer table that need the module and its data: the order of execution, and what is saved."""

import json

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from vramcast.collocation.service.requests import TableBody
from vramcast.errors import UserError
from vramcast.jobs.analysis.layers import detailed_table, layer_table
from vramcast.jobs.layer_tables import read_table
from vramcast.jobs.spec import NETWORK_INPUT, LayerRecord, LayerTable


class Branches(nn.Module):
    """A network with a skip connection, a view, an operation in place, and a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.left = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.right = nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(128, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        left, right = self.left(x), self.right(x)
        left += x
        joined = torch.cat([left, right], 1)
        return self.head(self.drop(self.pool(joined).flatten(1)))


@pytest.fixture(scope="module")
def table() -> LayerTable:
    return detailed_table(Branches().to("meta"), [torch.zeros(2, 3, 16, 16, device="meta")])


def named(table: LayerTable, name: str) -> LayerRecord:
    return next(layer for layer in table.layers if layer.name == name)


def test_details_leave_the_other_fields_as_they_are(table: LayerTable) -> None:
    plain = layer_table(Branches().to("meta"), [torch.zeros(2, 3, 16, 16, device="meta")])
    assert [item.basis for item in table.layers] == [item.basis for item in plain.layers]
    assert {item.inputs for item in plain.layers} == {None}
    assert plain.layers[0].to_json().keys() == plain.layers[0].basis.keys()


def test_inputs_name_the_layers_that_were_read_across_branches_views_and_operations_in_place(table: LayerTable) -> None:
    places = {item.name or item.kind: place for place, item in enumerate(table.layers)}
    reads = {item.name or item.kind: item.inputs for item in table.layers}
    assert reads["first"] == (NETWORK_INPUT,)
    assert reads["left"] == reads["right"] == (places["first"],)
    assert reads["cat"] == tuple(sorted((places["first"], places["left"], places["right"])))
    assert reads["drop"] == (places["pool"],)
    assert reads["head"] == (places["drop"],)


def test_each_layer_counts_what_it_is_the_first_to_save(table: LayerTable) -> None:
    saved = {item.name or item.kind: (item.saved, item.saved_fixed_bytes) for item in table.layers}
    assert saved["first"] == (0, 0)  # its input is the network's
    assert saved["left"] == (4 * 8 * 8, 0)
    assert saved["right"] == (4 * 8 * 8, 0)  # its output
    assert saved["pool"] == (8 * 8 * 8, 8 * 4 * 4 * 8)  # its input, and indices of eight bytes
    assert saved["drop"] == (0, 128)  # a mask of one byte an element
    assert saved["head"] == (128, 0)


def test_windows_dtypes_and_frozen_parameters_are_recorded() -> None:
    network = Branches().to("meta")
    network.first.requires_grad_(False)
    table = detailed_table(network, [torch.zeros(2, 3, 16, 16, device="meta")])
    first, left, pool = (named(table, name) for name in ("first", "left", "pool"))
    assert (first.kernel, first.stride, first.groups) == ((3, 3), (2, 2), 1)
    assert (left.groups, pool.kernel, pool.stride, pool.groups) == (2, (2,), (2,), None)
    assert (first.trainable, first.parameter_bytes, first.dtype) == (0, 4 * first.parameters, "float32")
    assert left.trainable == left.parameters


class Opaque(nn.Module):
    """Hides an operation from the modes of torch, as a library in C++ does."""

    def __init__(self) -> None:
        super().__init__()
        self.after = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            hidden = x * 2
        return self.after(hidden)  # type: ignore[no-any-return]


def test_sources_that_were_not_seen_are_unknown() -> None:
    table = detailed_table(Opaque().to("meta"), [torch.zeros(2, 4, device="meta")])
    assert named(table, "after").inputs is None


def test_a_network_can_be_trained_after_its_table_was_made() -> None:
    network = Branches().to("meta")
    x = torch.zeros(2, 3, 16, 16, device="meta")
    detailed_table(network, [x])
    network(x).sum().backward()
    assert network.first.weight.grad is not None


def test_details_pass_through_json_and_the_service(table: LayerTable) -> None:
    values = json.loads(json.dumps(table.to_json()))
    assert LayerTable.from_json(values) == table
    assert read_table(values) == table
    body = TableBody.model_validate(values)
    assert [LayerRecord.from_json(item.model_dump()) for item in body.layers] == list(table.layers)


@pytest.mark.parametrize("inputs", [[1], [-2], ["0"], 0])
def test_inputs_that_are_no_earlier_layers_are_refused(inputs: object) -> None:
    values = {"layers": [{"kind": "Linear", "output_shape": [4], "activations": 4, "parameters": 4, "inputs": inputs}],
              "input_elements": 4, "trainable_shapes": [[4]]}  # fmt: skip
    with pytest.raises(UserError, match="places of earlier layers"):
        read_table(values)
    with pytest.raises(ValidationError):
        TableBody.model_validate(values)
