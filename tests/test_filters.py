"""The filter accepts a spec if and only if its training runs on the meta device."""

import inspect
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_networks import NETWORKS
from torch import nn

from vramcast.jobs import filters, subject
from vramcast.jobs.families import cnn, make_spec, mlp, plan_of, shared_layers, template, transformer
from vramcast.jobs.plan import Node, Plan
from vramcast.jobs.shape_rules import SPECIFICATION, listing
from vramcast.jobs.spec import LayerTable, Spec
from vramcast.virtual_gpu.training import step as training
from vramcast.virtual_gpu.training.setup import IMPLEMENTATIONS, LOSSES, TrainingSetup, parse_call

REFUSALS = (RuntimeError, ValueError, IndexError, AssertionError)

# --- the oracle ------------------------------------------------------------------------------------------------------


def torch_refuses(spec: Spec) -> str | None:
    """Return the reason why a training step of the spec cannot run, or None."""
    setup = spec.training
    plan = plan_of(spec)
    if reason := _refused_on_a_card(setup, plan):
        return reason
    try:
        module = subject.build_subject(plan, setup.dtype)
        optimizer = make_optimizer(setup, list(module.parameters()))
        for size in setup.batch_sizes:
            inputs = subject.make_inputs(plan, size, setup.dtype)
            if size in (setup.batch_size, setup.last_batch_size):
                list(training.training_steps(module, optimizer, [[inputs]], setup.loss))
            else:
                module(*inputs)
    except REFUSALS as error:
        return f"{type(error).__name__}: {error}"
    return None


def _refused_on_a_card(setup: TrainingSetup, plan: Plan) -> str | None:
    """Raise for errors that the meta device misses, because it has neither values nor kernels."""
    if setup.loss == "bce" and setup.autocast:
        return "binary_cross_entropy raises under autocast, which has no meta device"
    if setup.loss == "bce" and _last(plan.root).kind not in ("Sigmoid", "Softmax"):
        return "binary_cross_entropy asserts 0 <= input <= 1 on values, which meta tensors lack"
    if setup.last_batch_size is not None and setup.last_batch_size >= setup.batch_size:
        return "the last batch of an epoch is what is left over: it cannot reach a full one"
    return None


def _last(node: Node) -> Node:
    return _last(node.children[-1]) if node.children else node


def make_optimizer(setup: TrainingSetup, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    name, arguments = parse_call(setup.optimizer)
    if setup.implementation != "fused":
        return training.make_optimizer(name, arguments, setup.implementation, parameters)
    # fused kernels do not run on meta tensors, so check the signature instead
    if "fused" not in inspect.signature(getattr(torch.optim, name)).parameters:
        raise RuntimeError(f"{name} is not fused anywhere")
    return training.make_optimizer(name, arguments, "default", parameters)


# --- specs of all families -------------------------------------------------------------------------------------------

ACTIVATIONS = st.sampled_from(sorted(shared_layers.ACTIVATIONS))
DROPOUTS = st.sampled_from([0.0, 0.25])
HEADS = st.sampled_from(sorted(shared_layers.HEADS))
OPTIMIZERS = st.sampled_from(
    ["Adam", "AdamW(amsgrad=True)", "SGD", "SGD(momentum=0.9, nesterov=True)", "RMSprop(centered=True)", "NAdam"]
)


def counts(least: int, most: int) -> st.SearchStrategy[int]:
    return st.integers(least, most)


MLPS = st.fixed_dictionaries(
    {
        "arch": st.sampled_from(sorted(mlp.WIDTHS)),
        "input_features": counts(1, 12),
        "output_features": counts(1, 6),
        "depth": counts(1, 4),
        "activation": ACTIVATIONS,
        "norm": st.sampled_from(mlp.NORMS),
        "dropout": DROPOUTS,
        "head": HEADS,
    }
)
CNNS = st.fixed_dictionaries(
    {
        "arch": st.sampled_from([*cnn.FILTERS, "residual", "dense"]),
        "input_channels": st.sampled_from([1, 3]),
        "input_size": counts(1, 20),
        "num_classes": counts(1, 5),
        "depth": counts(1, 9),
        "base_filters": counts(1, 8),
        "max_filters": counts(1, 16),
        "kernel_size": st.sampled_from([1, 2, 3, 3, 3, 4, 5]),
        "activation": ACTIVATIONS,
        "norm": st.sampled_from(shared_layers.IMAGE_NORMS),
        "dropout": DROPOUTS,
        "pooling": st.sampled_from(cnn.POOLINGS),
        "pool_every": counts(1, 3),
        "transition_every": st.sampled_from([None, 1, 2]),
        "head": HEADS,
    }
)
STAGES = st.builds(
    template.mutate,
    template=st.sampled_from(sorted(template.TEMPLATES)),
    stages=counts(1, 6),
    extra_convolutions=counts(-1, 1),
    order=st.sampled_from(template.ORDERS),
    width=st.sampled_from([0.02, 0.05]),
)
TEMPLATES = st.fixed_dictionaries(
    {
        "template": st.sampled_from(sorted(template.TEMPLATES)),
        "stages": STAGES,
        "input_size": counts(1, 40),
        "num_classes": counts(1, 5),
        "input_channels": st.sampled_from([1, 3]),
        "kernel_size": counts(1, 4),
        "padding": counts(0, 2),
        "pool_size": counts(1, 3),
        "classifier_features": counts(1, 8),
        "activation": ACTIVATIONS,
        "norm": st.sampled_from(shared_layers.IMAGE_NORMS),
        "dropout": DROPOUTS,
        "head": HEADS,
    }
)
TRANSFORMERS = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(transformer.KINDS),
        "vocabulary": counts(1, 20),
        "embedding_size": counts(1, 12),
        "layers": counts(1, 2),
        "heads": counts(1, 4),
        "feed_forward_size": counts(1, 9),
        "sequence_length": counts(1, 5),
        "num_classes": counts(1, 5),
        "dropout": DROPOUTS,
        "activation": ACTIVATIONS,
        "norm": st.sampled_from(transformer.NORMS),
    }
)
TRAININGS = st.builds(
    TrainingSetup,
    batch_size=counts(1, 4),
    last_batch_size=st.none() | counts(1, 3),
    loss=st.sampled_from(["cross_entropy"] * 3 + [item for item in LOSSES if item != "own"]),
    optimizer=OPTIMIZERS,
    implementation=st.sampled_from(["default"] * 6 + [item for item in IMPLEMENTATIONS if item != "in_backward"]),
    dtype=st.sampled_from(["fp32", "bf16", "fp16"]),
    autocast=st.sampled_from([None, None, "bf16"]),
    checkpointing=st.booleans(),
    dry_run_batch_size=st.none() | counts(1, 3),
)


@pytest.mark.parametrize(
    ("family", "networks", "examples"),
    [("mlp", MLPS, 80), ("cnn", CNNS, 80), ("template", TEMPLATES, 40), ("transformer", TRANSFORMERS, 60)],
    ids=["mlp", "cnn", "template", "transformer"],
)
def test_a_spec_is_accepted_if_and_only_if_its_training_runs(family: str, networks: Any, examples: int) -> None:
    seen: Counter[bool] = Counter()

    @settings(settings.get_profile("torch"), max_examples=examples)
    @given(networks, TRAININGS)
    def holds(network: dict[str, Any], setup: TrainingSetup) -> None:
        spec = make_spec(family, network, setup)
        verdict, refusal = filters.check(spec), torch_refuses(spec)
        seen[refusal is None] += 1
        assert isinstance(verdict, LayerTable) == (refusal is None), (verdict, refusal)

    holds()
    assert min(seen[True], seen[False]) >= 0.2 * seen.total(), seen


# --- reasons of rejections -------------------------------------------------------------------------------------------

SETUP = TrainingSetup(batch_size=8)
MLP = NETWORKS["mlp"]
CNN = {"arch": "uniform", "input_channels": 3, "input_size": 8, "num_classes": 2, "depth": 4, "base_filters": 4}
TRANSFORMER = {**NETWORKS["transformer"], "embedding_size": 6, "heads": 4}


def reason_of(family: str, network: dict[str, Any], **setup: Any) -> str:
    verdict = filters.check(make_spec(family, network, replace(SETUP, **setup)))
    assert isinstance(verdict, filters.Rejected), verdict
    return verdict.reason


def test_a_norm_rejects_a_batch_with_one_value() -> None:
    sentence = "BatchNorm1d at '0.1': expected N * prod(L) > 1, found L=(), N=1"
    assert reason_of("mlp", {**MLP, "norm": "batch"}, batch_size=1) == sentence
    assert reason_of("mlp", {**MLP, "norm": "batch"}, last_batch_size=1) == sentence
    assert reason_of("mlp", {**MLP, "norm": "batch"}, dry_run_batch_size=1) == sentence
    one = TrainingSetup(batch_size=1)
    assert isinstance(filters.check(make_spec("mlp", {**MLP, "norm": "layer"}, one)), LayerTable)


def test_reasons_name_the_layer_and_the_values() -> None:
    pooled = {**CNN, "pooling": "max", "pool_every": 1}
    assert reason_of("cnn", pooled) == "MaxPool2d at '7': expected H2 >= 1, found H2=0"
    assert reason_of("cnn", {**CNN, "input_size": 1, "norm": "instance"}) == (
        "InstanceNorm2d at '0.1': expected H * W > 1, found H=1, W=1"
    )
    assert reason_of("cnn", {**CNN, "arch": "dense", "kernel_size": 4}) == (
        "cat at '0': expected all(x[0] == N and x[2:] == S for x in others), "
        "found N=8, S=(8, 8), others=[(8, 32, 9, 9)]"
    )
    assert reason_of("cnn", {**CNN, "arch": "residual", "kernel_size": 2}) == (
        "add at '0': expected all(x == y or x == 1 or y == 1 for x, y in zip(A[::-1], other[::-1])), "
        "found A=(8, 4, 8, 8), other=(8, 4, 10, 10)"
    )
    assert reason_of("transformer", TRANSFORMER) == (
        "MultiheadAttention at '2.0.self_attn': expected embed_dim % num_heads == 0, found embed_dim=6, num_heads=4"
    )
    assert reason_of("transformer", {**TRANSFORMER, "kind": "decoder"}) == (
        "CausalSelfAttention at '2.0.body.0': expected size % heads == 0, found size=6, heads=4"
    )
    vgg = {"template": "vgg", "stages": [[4, 1]], "input_size": 2, "num_classes": 2, "kernel_size": 5, "padding": 0}
    assert reason_of("template", vgg) == (
        "Conv2d at '0.0': expected H1 + 2 * padding >= dilation * (kernel_size - 1) + 1, "
        "found H1=2, dilation=1, kernel_size=5, padding=0"
    )


# --- the specification as text -------------------------------------------------------------------------------------


def test_the_listing_has_every_process_with_its_conditions() -> None:
    processes = listing().split("\n\n")
    assert len(processes) == len(SPECIFICATION)
    for text, (name, process) in zip(processes, SPECIFICATION.items(), strict=True):
        lines = text.splitlines()
        assert lines[0].startswith(f"process {name} (Input = [{process.reads}]: set of nat")
        assert lines[1].startswith("pre  ")
        assert sum(line.startswith("post ") for line in lines) == 1
        assert lines[-1] == "end_process"
        assert all(condition in text for condition in (*process.pre, *process.let.values(), *process.post))
        assert f"Output = {process.writes}" in text


def test_the_listing_of_a_linear_layer_is_readable() -> None:
    assert (
        "process Linear (Input = [*B, F]: set of nat; default bias = True)\n"
        "pre  F == in_features\n"
        "post Output = (*B, out_features)\n"
        "end_process"
    ) in listing()
