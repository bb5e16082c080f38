"""The rules for training setups agree with torch: optimizers, their arguments, losses and precisions."""

import inspect
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from vramcast.jobs import filters, subject
from vramcast.jobs.analysis import optimizers
from vramcast.jobs.families import make_spec, plan_of
from vramcast.jobs.spec import LayerTable
from vramcast.virtual_gpu.training import step as training
from vramcast.virtual_gpu.training.setup import IMPLEMENTATIONS, TrainingSetup, parse_call

REFUSALS = (RuntimeError, ValueError, IndexError, AssertionError, TypeError)
SETUP = TrainingSetup(batch_size=8)
MLP = {"arch": "pyramid", "input_features": 8, "output_features": 2, "depth": 2}


def reason_of(network: dict[str, Any], **setup: Any) -> str:
    verdict = filters.check(make_spec("mlp", network, replace(SETUP, **setup)))
    assert isinstance(verdict, filters.Rejected), verdict
    return verdict.reason


@pytest.mark.parametrize(
    ("setup", "sentence"),
    [
        ({"optimizer": "Adan"}, "no optimizer Adan: choose one of ['ASGD', 'Adadelta',"),
        ({"optimizer": "LBFGS"}, "LBFGS runs the training step several times per step, which a spec cannot describe"),
        ({"optimizer": "Muon(lr=0.1)"}, "Muon takes matrices only, and these networks have biases"),
        ({"optimizer": "SparseAdam"}, "SparseAdam takes sparse gradients only, and these networks have dense ones"),
        (
            {"optimizer": "RMSprop(fused=True)"},
            "RMSprop has no fused implementation, only ('default', 'foreach', 'single')",
        ),
        (
            {"optimizer": "Adadelta", "implementation": "fused"},
            "Adadelta has no fused implementation, only ('default', 'foreach', 'single')",
        ),
        (
            {"optimizer": "SGD(nesterov=True)"},
            "SGD expects ['not nesterov or (momentum > 0 and dampening == 0)'], found {'nesterov': True}",
        ),
        (
            {"optimizer": "SGD(lr=-1, momentum=-1)"},
            "SGD expects ['lr >= 0', 'momentum >= 0'], found {'lr': -1, 'momentum': -1}",
        ),
        ({"optimizer": "Adam(lr='fast')"}, "Adam expects ['lr >= 0'], found {'lr': 'fast'}"),
        (
            {"loss": "bce"},
            "the loss bce reads probabilities, the last layer is Linear: use bce_with_logits or a sigmoid head",
        ),
        ({"last_batch_size": 8}, "the last batch 8 is not smaller than 8"),
        (
            {"dtype": "fp16", "autocast": "fp16"},
            "autocast fp16 scales the loss, and only a fused optimizer unscales gradients in fp16: use dtype fp32",
        ),
    ],
)
def test_a_training_setup_that_cannot_run_is_rejected_with_a_reason(setup: dict[str, Any], sentence: str) -> None:
    assert reason_of(MLP, **setup).startswith(sentence)


def test_bce_is_rejected_under_autocast() -> None:
    reason = reason_of({**MLP, "head": "sigmoid"}, loss="bce", autocast="bf16")
    assert reason == "torch refuses the loss bce under autocast: use bce_with_logits"


ARGUMENTS: dict[str, list[Any]] = {
    "lr": [0.1, 0, -0.1, "fast", None],
    "weight_decay": [0.1, -1],
    "momentum": [0, 0.9, -0.9],
    "dampening": [0.5],
    "nesterov": [False, True],
    "betas": [(0.5, 0.9), [0.5, 0.9], (0, 0.9), (0.5, 1.0), (-0.1, 0.9), (0.5,), (0.5, 0.9, 0.9), 0.9],
    "eps": [1e-8, 0, -1, (1e-8, 1e-3), (None, 1e-3), (1e-8, -1)],
    "alpha": [0.9, -1],
    "centered": [True],
    "amsgrad": [True],
    "maximize": [True],
    "rho": [0, 1, 2, -1],
    "lr_decay": [0.1, -1],
    "initial_accumulator_value": [0.1, -1],
    "beta2_decay": [-0.8, 0.8],
    "d": [1, 0.5],
    "momentum_decay": [0.1, -1],
    "decoupled_weight_decay": [True],
    "etas": [(0.5, 1.2), (1.5, 1.2), (0.5, 0.9), (0.0, 1.2), (0.5,)],
    "step_sizes": [(1e-6, 50), (50, 1e-6), (1.0,)],
    "lambd": [1e-4, -1],
    "t0": [10, -1],
}


def optimizer_refuses(call: str) -> bool:
    name, arguments = parse_call(call)
    weight = nn.Parameter(torch.ones(2, 3))
    weight.grad = torch.ones_like(weight)
    try:
        getattr(torch.optim, name)([weight], **arguments).step()
    except (ValueError, TypeError, IndexError, RuntimeError):
        return True
    return False


@pytest.mark.parametrize("name", sorted(optimizers.OPTIMIZERS))
def test_an_optimizer_call_is_accepted_if_and_only_if_torch_takes_it(name: str) -> None:
    seen: Counter[bool] = Counter()
    calls = [f"{name}({argument}={value!r})" for argument, values in ARGUMENTS.items() for value in values]
    calls += [f"{name}(momentum=0.9, nesterov=True)", f"{name}(momentum=0.9, nesterov=True, dampening=0.5)"]
    for call in calls:
        if call == "Adam(decoupled_weight_decay=True)":  # equivalent to AdamW; older versions of torch lack it
            continue
        verdict = filters.check(make_spec("mlp", MLP, replace(SETUP, optimizer=call)))
        assert isinstance(verdict, filters.Rejected) == optimizer_refuses(call), (call, verdict)
        seen[isinstance(verdict, LayerTable)] += 1
    assert seen[True] >= 5
    assert seen[False] >= 5


@pytest.mark.parametrize("name", sorted(optimizers.OPTIMIZERS))
@pytest.mark.parametrize("implementation", [item for item in IMPLEMENTATIONS if item != "in_backward"])
def test_an_implementation_is_accepted_if_and_only_if_the_class_has_it(name: str, implementation: str) -> None:
    verdict = filters.check(make_spec("mlp", MLP, replace(SETUP, optimizer=name, implementation=implementation)))
    argument = {"foreach": "foreach", "single": "foreach", "fused": "fused"}.get(implementation)
    takes_it = argument is None or argument in inspect.signature(getattr(torch.optim, name)).parameters
    assert isinstance(verdict, LayerTable) == takes_it


def test_generated_networks_are_trained_whole_and_after_the_backward_pass() -> None:
    assert "in_backward" in reason_of(MLP, implementation="in_backward")
    assert "adapters" in reason_of(MLP, adapter="lora")


def test_the_calls_above_use_every_argument_of_the_optimizers() -> None:
    assert {item for rule in optimizers.OPTIMIZERS.values() for item in rule.arguments} == ARGUMENTS.keys()


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop"])
@pytest.mark.parametrize("implementation", ["single", "fused"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_only_fused_optimizers_take_scaled_fp16_gradients(optimizer: str, implementation: str, dtype: str) -> None:
    """The GradScaler of fp16 autocast can unscale fp16 gradients only inside fused optimizers."""
    setup = replace(SETUP, optimizer=optimizer, implementation=implementation, dtype=dtype, autocast="fp16")
    spec = make_spec("mlp", MLP, setup)
    verdict = filters.check(spec)
    try:
        module = subject.build_subject(plan_of(spec), dtype, "cpu")
        made = training.make_optimizer(optimizer, {}, implementation, module.parameters())
        inputs = subject.make_inputs(plan_of(spec), 8, dtype, "cpu")
        half = partial(torch.autocast, "cpu", torch.float16)
        list(training.training_steps(module, made, [[inputs]], "cross_entropy", half, torch.amp.GradScaler("cpu")))
    except REFUSALS as error:
        assert isinstance(verdict, filters.Rejected), error
    else:
        assert isinstance(verdict, LayerTable)
