"""The static estimate computed by hand, and optimizer state compared with torch."""

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from vramcast.jobs import filters
from vramcast.jobs.analysis.layers import layer_table
from vramcast.jobs.analysis.optimizers import DEMANDS, OPTIMIZERS, REFUSED, state_elements
from vramcast.jobs.analysis.static import shape_inference_bytes, static_estimate
from vramcast.jobs.families import make_spec
from vramcast.jobs.spec import LayerTable
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.training.setup import TrainingSetup, parse_call
from vramcast.virtual_gpu.training.step import make_optimizer

# --- a textbook example ----------------------------------------------------------------------------------


def mnist() -> LayerTable:
    """Return the table of the example network on the slides of Guan (SHARCNET 2020)."""
    network = nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, 1024), nn.ReLU(inplace=True), nn.Linear(1024, 10),
    )  # fmt: skip
    return layer_table(network.to("meta"), [torch.randn(4, 1, 28, 28, device="meta")])


def test_the_worked_example_has_the_counts_of_the_slides() -> None:
    table = mnist()
    assert table.parameters == 1_111_946
    assert table.input_elements + table.activations == 29_978


@pytest.mark.parametrize("batch_size", [1, 64, 1024])
def test_the_worked_example_has_the_bytes_of_the_slides(batch_size: int) -> None:
    table = mnist()
    activations = table.input_elements + table.activations
    estimate = shape_inference_bytes(table.parameters, activations, batch_size) / MIB
    assert estimate == pytest.approx(8.48 + batch_size * 0.229, rel=0.002)


def test_the_worked_example_in_half_precision_takes_half() -> None:
    assert 2 * shape_inference_bytes(100, 10, 8, element_bytes=2) == shape_inference_bytes(100, 10, 8)


# --- the static estimate by hand --------------------------------------------------------------------------------------

# Linear(6, 3), BatchNorm1d(3), ReLU, Dropout, Linear(3, 2): 21 + 6 + 8 parameters, 3 + 3 + 3 + 3 + 2 outputs
SMALL = {"arch": "pyramid", "input_features": 6, "output_features": 2, "depth": 1, "norm": "batch", "dropout": 0.5}
TENSORS = 6


def estimate_parts(**setup: Any) -> tuple[int, int, int, int]:
    training = TrainingSetup(batch_size=10, **setup)
    table = filters.check(make_spec("mlp", SMALL, training))
    assert isinstance(table, LayerTable)
    estimate = static_estimate(training, table)
    parts = (estimate.parameter_bytes, estimate.gradient_bytes, estimate.optimizer_bytes, estimate.activation_bytes)
    assert estimate.total_bytes == sum(parts)
    return parts


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        ({}, (4 * 35, 4 * 35, 8 * 35, 10 * 4 * (6 + 14))),
        ({"dtype": "bf16"}, (2 * 35, 2 * 35, 4 * 35, 10 * 2 * (6 + 14))),
        ({"dtype": "fp16"}, (2 * 35, 2 * 35, 4 * 35, 10 * 2 * (6 + 14))),
        ({"autocast": "bf16"}, (4 * 35, 4 * 35, 8 * 35, 10 * (4 * 6 + 2 * 14))),
        ({"optimizer": "SGD"}, (140, 140, 0, 800)),
        ({"optimizer": "SGD(momentum=0.9)"}, (140, 140, 140, 800)),
        ({"optimizer": "AdamW(amsgrad=True)"}, (140, 140, 420, 800)),
        ({"implementation": "fused"}, (140, 140, 280 + 4 * TENSORS, 800)),
        ({"checkpointing": True, "accumulate": 3}, (140, 140, 280, 800)),
        ({"last_batch_size": 3, "dry_run_batch_size": 2}, (140, 140, 280, 800)),
    ],
)
def test_a_small_mlp_has_the_estimate_computed_by_hand(
    setup: dict[str, Any], expected: tuple[int, int, int, int]
) -> None:
    assert estimate_parts(**setup) == expected


def test_frozen_parameters_have_neither_gradient_nor_state() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to("meta")
    network[0].requires_grad_(False)
    table = layer_table(network, [torch.zeros(2, 4, device="meta")])
    estimate = static_estimate(TrainingSetup(batch_size=2), table)
    assert (estimate.parameter_bytes, estimate.gradient_bytes, estimate.optimizer_bytes) == (4 * 30, 4 * 10, 8 * 10)


# --- optimizers against torch -----------------------------------------------------------------------------------------

SHAPES = [(7,), (1,), (3, 5), (1, 4), (4, 2, 3), (2, 3, 4, 5), (6, 1, 3, 3)]
CALLS = [
    *OPTIMIZERS,
    "SGD(momentum=0.9)",
    "SGD(momentum=0.0)",
    "SGD(momentum=0.9, nesterov=True)",
    "SGD(momentum=0.9, dampening=0.5, weight_decay=0.1)",
    "Adam(amsgrad=True)",
    "Adam(amsgrad=False, weight_decay=0.1)",
    "AdamW(amsgrad=True)",
    "RMSprop(momentum=0.9)",
    "RMSprop(centered=True)",
    "RMSprop(momentum=0.9, centered=True)",
    "Adagrad(initial_accumulator_value=0.1, lr_decay=0.1)",
    "Adadelta(weight_decay=0.1)",
    "Adafactor(d=2.0)",
    "Adamax(maximize=True)",
    "NAdam(decoupled_weight_decay=True)",
    "RAdam(decoupled_weight_decay=True)",
    "Rprop(step_sizes=(1e-6, 10))",
    "ASGD(t0=1)",
]


def state_of(call: str, implementation: str, device: str) -> int:
    """Return the elements of state that torch's optimizer keeps on the device of the parameters after a step."""
    parameters = [nn.Parameter(torch.ones(shape, device=device)) for shape in SHAPES]
    for item in parameters:
        item.grad = torch.ones_like(item)
    optimizer = make_optimizer(*parse_call(call), implementation, parameters)
    try:
        optimizer.step()
    except RuntimeError as error:
        # ASGD and Adafactor read a value, which a meta tensor lacks; their state exists by then
        assert "meta" in str(error)
    tensors = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    return sum(tensor.numel() for tensor in tensors if tensor.device.type == device)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("implementation", ["default", "single", "foreach"])
def test_state_has_the_size_that_torch_keeps_on_the_device(call: str, implementation: str) -> None:
    """Step counters stay on the CPU, with parameters on meta as on a GPU."""
    training = TrainingSetup(batch_size=1, optimizer=call, implementation=implementation)
    assert state_elements(training, SHAPES) == state_of(call, implementation, "meta")


@pytest.mark.parametrize("call", [call for call in CALLS if OPTIMIZERS[parse_call(call)[0]].fused])
def test_fused_implementations_keep_their_steps_on_the_device(call: str) -> None:
    training = TrainingSetup(batch_size=1, optimizer=call, implementation="fused")
    assert state_elements(training, SHAPES) == state_of(call, "fused", "cpu")


def test_every_optimizer_of_torch_is_supported_or_refused() -> None:
    assert not OPTIMIZERS.keys() & REFUSED.keys()
    of_torch = {
        name
        for name, item in vars(torch.optim).items()
        if inspect.isclass(item) and issubclass(item, torch.optim.Optimizer) and item is not torch.optim.Optimizer
    }
    assert of_torch <= OPTIMIZERS.keys() | REFUSED.keys()
    assert (OPTIMIZERS.keys() | REFUSED.keys()) - of_torch <= {"Adafactor", "Muon"}  # newer than the oldest torch


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_arguments_are_those_of_the_class(name: str) -> None:
    rule = OPTIMIZERS[name]
    parameters = inspect.signature(getattr(torch.optim, name)).parameters
    assert rule.arguments <= parameters.keys()
    assert rule.fused == ("fused" in parameters)
    # The others choose an implementation, or turn Adam into AdamW: a spec has its own fields for these.
    left_out = {"params", "foreach", "fused", "capturable", "differentiable"}
    left_out |= {"decoupled_weight_decay"} if name == "Adam" else set()
    assert parameters.keys() - rule.arguments == left_out & parameters.keys()
    assert rule.demands.keys() <= rule.arguments
    assert DEMANDS.keys() <= {item for other in OPTIMIZERS.values() for item in other.arguments}
