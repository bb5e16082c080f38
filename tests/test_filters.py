"""The filter is held to torch: it accepts a spec if and only if the training runs on the meta device."""

import inspect
import random
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from dataset_builder import filters, subject, training
from dataset_builder.analysis import optimizers
from dataset_builder.families import blocks, cnn, make_spec, mlp, pieces, plan_of, template, transformer
from dataset_builder.plan import InputTensor, Node, Plan, chain, layer
from dataset_builder.schema import IMPLEMENTATIONS, LOSSES, LayerTable, Spec, TrainingSetup, parse_call
from dataset_builder.specification import SPECIFICATION, listing

REFUSALS = (RuntimeError, ValueError, IndexError, AssertionError)
PROPERTY = settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)

# --- the oracle ------------------------------------------------------------------------------------------------------


def torch_refuses(spec: Spec) -> str | None:
    """Why a step of the spec's training cannot run, None where all of them can."""
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
                training.train_step(module, optimizer, [inputs], setup.loss, None, None)
            else:
                module(*inputs)
    except REFUSALS as error:
        return f"{type(error).__name__}: {error}"
    return None


def _refused_on_a_card(setup: TrainingSetup, plan: Plan) -> str | None:
    """What the meta device lets pass, because it knows neither values nor kernels."""
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
    # a fused kernel runs on no meta tensor: what the signature offers stands for it
    if "fused" not in inspect.signature(getattr(torch.optim, name)).parameters:
        raise RuntimeError(f"{name} is not fused anywhere")
    return training.make_optimizer(name, arguments, "default", parameters)


# --- specs of all families -------------------------------------------------------------------------------------------

ACTIVATIONS = st.sampled_from(sorted(pieces.ACTIVATIONS))
DROPOUTS = st.sampled_from([0.0, 0.25])
HEADS = st.sampled_from(sorted(pieces.HEADS))
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
        "norm": st.sampled_from(pieces.IMAGE_NORMS),
        "dropout": DROPOUTS,
        "pooling": st.sampled_from(cnn.POOLINGS),
        "pool_every": counts(1, 3),
        "transition_every": st.sampled_from([None, 1, 2]),
        "head": HEADS,
    }
)
STAGES = st.builds(
    template.mutate,
    template=st.sampled_from(sorted(template.SEEDS)),
    stages=counts(1, 6),
    extra_convolutions=counts(-1, 1),
    order=st.sampled_from(template.ORDERS),
    width=st.sampled_from([0.02, 0.05]),
)
TEMPLATES = st.fixed_dictionaries(
    {
        "template": st.sampled_from(sorted(template.SEEDS)),
        "stages": STAGES,
        "input_size": counts(1, 40),
        "num_classes": counts(1, 5),
        "input_channels": st.sampled_from([1, 3]),
        "kernel_size": counts(1, 4),
        "padding": counts(0, 2),
        "pool_size": counts(1, 3),
        "classifier_features": counts(1, 8),
        "activation": ACTIVATIONS,
        "norm": st.sampled_from(pieces.IMAGE_NORMS),
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
    loss=st.sampled_from(["cross_entropy"] * 3 + list(LOSSES)),
    optimizer=OPTIMIZERS,
    implementation=st.sampled_from(["default"] * 6 + list(IMPLEMENTATIONS)),
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

    @settings(PROPERTY, max_examples=examples)
    @given(networks, TRAININGS)
    def holds(network: dict[str, Any], setup: TrainingSetup) -> None:
        spec = make_spec(family, network, setup)
        verdict, refusal = filters.check(spec), torch_refuses(spec)
        seen[refusal is None] += 1
        assert isinstance(verdict, LayerTable) == (refusal is None), (verdict, refusal)

    holds()
    assert min(seen[True], seen[False]) >= 0.2 * seen.total(), seen


# --- random chains of layers -----------------------------------------------------------------------------------------

# Ranks that torch would take as well, each time losing the batch: an image without one, a sequence broadcast over it.
# A plan always has its batch first, so the specification asks for these and for no others.
RANKS: dict[type[nn.Module], int] = {
    nn.Conv2d: 4,
    nn.MaxPool2d: 4,
    nn.AvgPool2d: 4,
    nn.AdaptiveAvgPool2d: 4,
    nn.InstanceNorm2d: 4,
    nn.TransformerEncoderLayer: 3,
    blocks.LearnedPositions: 3,
}


def _batch_first(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    x = inputs[0]
    if x.dim() != RANKS.get(type(module), x.dim()):
        raise ValueError(f"{type(module).__name__} without a batch")
    if not x.is_floating_point() and not isinstance(module, nn.Embedding):
        raise ValueError("torch may compute with tokens as with numbers (ReLU does), where no network means to")


def chain_refused(plan: Plan, batch_size: int, device: str) -> str | torch.Size:
    """Why forward and backward do not run, or the output's shape where they do."""
    try:
        module = subject.build_subject(plan, device=device)
        for part in module.modules():
            if not list(part.children()) or type(part) in RANKS:
                part.register_forward_pre_hook(_batch_first)
        output = module(*subject.make_inputs(plan, batch_size, device=device))
        if output.requires_grad:  # a chain without parameters has nothing to train
            output.sum().backward()
    except (*REFUSALS, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    shape: torch.Size = output.shape
    return shape


# Each layer alone: input shapes, then the values of every argument. Zeros and negatives are for what torch must refuse.
IMAGES = [(2, 2, 4, 5), (1, 1, 1, 1), (1, 4, 1, 1), (1, 2, 1, 3), (3, 4, 6, 2), (2, 4, 3), (2, 4), (2, 2, 2, 2, 2)]
VECTORS = [(2, 4), (1, 4), (1, 1), (3, 2, 4), (1, 4, 1), (2, 4, 2), (4,), (1, 2, 3, 4), (2, 2, 1, 1)]
POOLING = {"kernel_size": [0, 1, 2, 3, 4, 5], "stride": [None, 0, 1, 2, 3], "padding": [-1, 0, 1, 2]}
GRIDS: dict[str, tuple[list[tuple[int, ...]], dict[str, list[Any]]]] = {
    "Conv2d": (
        IMAGES,
        {
            "in_channels": [1, 2, 4],
            "out_channels": [1, 2, 4] * 4 + [3, 0],
            "kernel_size": [1, 2, 3, 4] * 4 + [0],
            "stride": [1, 2, 3] * 4 + [0],
            "padding": [0, 1, 2] * 5 + [-1],
            "dilation": [1, 2] * 8 + [0],
            "groups": [1, 1, 1, 2, 4] * 2 + [0],
            "bias": [True, False],
        },
    ),
    "MaxPool2d": (IMAGES, POOLING),
    "AvgPool2d": (IMAGES, POOLING),
    "AdaptiveAvgPool2d": (IMAGES, {"output_size": [1, 2, 7]}),
    "BatchNorm1d": (VECTORS, {"num_features": [1, 2, 4]}),
    "BatchNorm2d": (IMAGES, {"num_features": [1, 2, 4]}),
    "InstanceNorm2d": (IMAGES, {"num_features": [1, 2, 4], "affine": [True, False]}),
    "GroupNorm": (VECTORS, {"num_groups": [1, 2, 3, 4], "num_channels": [1, 2, 4]}),
    "LayerNorm": (VECTORS, {"normalized_shape": [1, 2, 3, 4]}),
    "Linear": (VECTORS, {"in_features": [1, 2, 3, 4], "out_features": [1, 5], "bias": [True, False]}),
    "Softmax": (VECTORS, {"dim": [-5, -4, -3, -2, -1, 0, 1, 2, 3, 4]}),
    "Flatten": (VECTORS, {}),
    "Dropout": (VECTORS, {"p": [0.0, 0.5]}),
    "LearnedPositions": (VECTORS, {"length": [1, 2, 3], "size": [1, 2, 4]}),
    "MeanOverSequence": (VECTORS, {}),
    "CausalSelfAttention": (VECTORS, {"size": [1, 2, 3, 4], "heads": [1, 2, 3], "dropout": [0.0, 0.5]}),
    "TransformerEncoderLayer": (
        VECTORS,
        {
            "d_model": [1, 2, 4],
            "nhead": [1, 2],
            "dim_feedforward": [3],
            "dropout": [0.0],
            "activation": ["relu", layer("PReLU")],
            "batch_first": [True],
            "norm_first": [True, False],
        },
    ),
    **{kind: (VECTORS, {}) for kind in ("Identity", "PReLU", "ReLU", "GELU", "Sigmoid", "Tanh", "Softplus")},
}
MOST_CASES = 1500


@pytest.mark.parametrize("kind", GRIDS)
@pytest.mark.filterwarnings("ignore:input's size at dim=1", "ignore:Initializing zero-element tensors")
def test_a_layer_alone_is_accepted_if_and_only_if_it_runs(kind: str) -> None:
    shapes, grid = GRIDS[kind]
    cases: Iterable[tuple[Any, ...]] = product(shapes, *grid.values())
    if prod(map(len, grid.values())) * len(shapes) > MOST_CASES:
        draw = random.Random(0)
        cases = [tuple(draw.choice(values) for values in (shapes, *grid.values())) for _ in range(MOST_CASES)]
    for shape, *values in cases:
        args = dict(zip(grid, values, strict=True))
        plan = Plan((InputTensor(shape[1:]),), layer(kind, **args))
        truth, found = chain_refused(plan, shape[0], "cpu"), walked(plan, shape[0])
        agree = isinstance(found, str) if isinstance(truth, str) else found == tuple(truth)
        assert agree, (shape, args, found, truth)


DENSE_LAYERS = [
    layer("Conv2d", in_channels=2, out_channels=1, kernel_size=3, padding=1),
    layer("Conv2d", in_channels=3, out_channels=2, kernel_size=3, padding=1),
    layer("Conv2d", in_channels=2, out_channels=1, kernel_size=3),
    layer("Conv2d", in_channels=2, out_channels=1, kernel_size=1, stride=2),
    layer("Linear", in_features=3, out_features=3),
    layer("Flatten"),
    layer("Identity"),
    layer("MeanOverSequence"),
]


@pytest.mark.parametrize("shape", [(2, 2, 3, 3), (1, 2, 1, 1), (2, 3), (2, 2, 3), (3, 1, 3)])
def test_a_dense_block_is_accepted_if_and_only_if_its_features_join(shape: tuple[int, ...]) -> None:
    for children in [(), *product(DENSE_LAYERS), *product(DENSE_LAYERS, DENSE_LAYERS)]:
        plan = Plan((InputTensor(shape[1:]),), Node("DenseBlock", {}, children))
        truth, found = chain_refused(plan, shape[0], "cpu"), walked(plan, shape[0])
        assert isinstance(found, str) if isinstance(truth, str) else found == tuple(truth), (plan, found, truth)


@pytest.mark.parametrize("flat_memory", [False, True])
def test_an_encoder_decoder_is_accepted_if_and_only_if_its_memory_fits(flat_memory: bool) -> None:
    tokens = InputTensor((3,), 7)
    accepted = 0
    for source, target, size, heads in product([2, 4], [2, 4], [2, 4], [1, 2, 3]):
        memory = [layer("Embedding", num_embeddings=7, embedding_dim=source)]
        args = {"dim_feedforward": 5, "dropout": 0.0, "activation": "relu", "batch_first": True, "norm_first": False}
        decoder = layer("TransformerDecoderLayer", d_model=size, nhead=heads, **args)
        root = Node(
            "EncoderDecoder",
            {},
            (
                chain(*memory, *[layer("MeanOverSequence")] * flat_memory),
                chain(layer("Embedding", num_embeddings=7, embedding_dim=target)),
                chain(decoder),
                chain(layer("Linear", in_features=size, out_features=7)),
            ),
        )
        plan = Plan((tokens, tokens), root)
        truth = chain_refused(plan, 2, "cpu")
        try:
            filters._Walk(2).run(plan)
            found = None
        except filters.Violation as violation:
            found = str(violation)
        assert (found is None) == (not isinstance(truth, str)), (found, truth)
        accepted += found is None
    assert (accepted > 0) != flat_memory


SIZES = counts(1, 4)
IMAGE = ("Conv2d", "MaxPool2d", "AvgPool2d", "AdaptiveAvgPool2d", "BatchNorm2d", "InstanceNorm2d")
SEQUENCE = ("LearnedPositions", "MeanOverSequence", "CausalSelfAttention", "TransformerEncoderLayer")
NORMS = ("BatchNorm1d", "GroupNorm", "LayerNorm")
ANY = ("Linear", *NORMS, "PReLU", "Dropout", "Softmax", "Flatten", "Identity", "ReLU", "GELU")
COMPOSITES = ("Residual", "Residual", "DenseBlock", "Sequential", "CheckpointedSequential")


class Drawing:
    """Draws layers that mostly fit the shape before them."""

    def __init__(self, draw: st.DrawFn, batch_size: int) -> None:
        self.draw = draw
        self.batch_size = batch_size

    def near(self, right: int) -> int:
        return right if self.draw(counts(0, 9)) else self.draw(SIZES)

    def chain(self, x: filters.Tensor, longest: int, nested: int = 0) -> tuple[list[Node], filters.Tensor]:
        nodes = []
        for _ in range(self.draw(counts(1, longest))):
            nodes.append(self.node(x, nested))
            with suppress(filters.Violation):  # a hint for what comes next: torch alone decides what is right
                x = filters._Walk(self.batch_size).node(nodes[-1], x, "")
        return nodes, x

    def node(self, x: filters.Tensor, nested: int) -> Node:
        fitting = {4: IMAGE, 3: SEQUENCE}.get(len(x.shape), ANY)
        kinds = fitting + ANY + (() if nested > 1 else COMPOSITES)
        kind = self.draw(st.sampled_from(kinds if self.draw(counts(0, 19)) else (*IMAGE, *SEQUENCE, "Embedding")))
        if x.tokens and self.draw(counts(0, 9)):
            kind = "Embedding"
        return self.composite(kind, x, nested) if kind in COMPOSITES else layer(kind, **self.arguments(kind, x.shape))

    def composite(self, kind: str, x: filters.Tensor, nested: int) -> Node:
        if kind == "Residual":
            body, out = self.chain(x, 2, nested + 1)
            other = [layer("Identity")] if self.draw(st.booleans()) else self.chain(x, 2, nested + 1)[0]
            if self.draw(st.booleans()) and len(x.shape) == len(out.shape) == 4:
                other = [layer("Conv2d", in_channels=x.shape[1], out_channels=out.shape[1], kernel_size=1)]
            return Node(kind, {"shortcut_first": self.draw(st.booleans())}, (chain(*body), chain(*other)))
        if kind == "DenseBlock":
            return Node(kind, {}, tuple(self.growth(x, k) for k in range(self.draw(counts(0, 3)))))
        return Node(kind, {}, tuple(self.chain(x, 3, nested + 1)[0]))

    def growth(self, x: filters.Tensor, k: int) -> Node:
        """A layer that adds a channel to a dense block."""
        channels = self.near(x.shape[1] + k if len(x.shape) > 1 else 1)
        if len(x.shape) == 2:
            return layer("Linear", in_features=channels, out_features=1)
        padding = 1 if self.draw(counts(0, 5)) else 0
        return layer("Conv2d", in_channels=channels, out_channels=1, kernel_size=3, padding=padding)

    def arguments(self, kind: str, shape: tuple[int, ...]) -> dict[str, Any]:
        channels = self.near(shape[1] if len(shape) > 1 else 2)
        last = self.near(shape[-1])
        wide = self.draw(SIZES)
        make = getattr(self, kind.lower(), None)
        if make is not None:
            return make(channels)
        known: dict[str, dict[str, Any]] = {
            "AdaptiveAvgPool2d": {"output_size": wide},
            "BatchNorm1d": {"num_features": channels},
            "BatchNorm2d": {"num_features": channels},
            "CausalSelfAttention": {"size": last, "heads": self.draw(counts(1, 2)), "dropout": self.draw(DROPOUTS)},
            "Dropout": {"p": self.draw(DROPOUTS)},
            "Embedding": {"num_embeddings": 7, "embedding_dim": wide},
            "GroupNorm": {"num_groups": self.draw(counts(1, 2)), "num_channels": channels},
            "InstanceNorm2d": {"num_features": channels, "affine": self.draw(st.booleans())},
            "LayerNorm": {"normalized_shape": last},
            "LearnedPositions": {"length": channels, "size": last},
            "Linear": {"in_features": last, "out_features": wide, "bias": self.draw(st.booleans())},
            "Softmax": {"dim": self.draw(counts(-3, 3))},
            "TransformerEncoderLayer": {
                "d_model": last,
                "nhead": self.draw(counts(1, 2)),
                "dim_feedforward": wide,
                "dropout": self.draw(DROPOUTS),
                "activation": self.draw(st.sampled_from(["relu", "gelu", layer("PReLU")])),
                "batch_first": True,
                "norm_first": self.draw(st.booleans()),
            },
        }
        return known.get(kind, {})

    def conv2d(self, channels: int) -> dict[str, Any]:
        groups = self.draw(st.sampled_from([1, 1, 1, channels, 2]))
        filters_ = self.draw(SIZES) * (groups if self.draw(counts(0, 3)) else 1)
        return {
            "in_channels": channels,
            "out_channels": filters_,
            "kernel_size": self.draw(counts(1, 4)),
            "stride": self.draw(st.sampled_from([1, 1, 1, 2, 3, 3, 0])),
            "padding": self.draw(st.sampled_from([0, 1, 1, 2, 2, -1])),
            "dilation": self.draw(st.sampled_from([1, 1, 1, 1, 2, 2, 3, 0])),
            "groups": groups,
            "bias": self.draw(st.booleans()),
        }

    def maxpool2d(self, _: int) -> dict[str, Any]:
        return {
            "kernel_size": self.draw(counts(1, 4)),
            "stride": self.draw(st.sampled_from([None, None, 1, 2, 3, 0])),
            "padding": self.draw(st.sampled_from([0, 0, 0, 1, 1, 2, -1])),
        }

    avgpool2d = maxpool2d


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, int]:
    batch_size = draw(counts(1, 3))
    image = InputTensor((draw(SIZES), draw(counts(1, 6)), draw(counts(1, 6))))
    sequence = InputTensor((draw(SIZES), draw(SIZES)))
    tokens = InputTensor((draw(SIZES),), 7)
    given_ = draw(st.sampled_from([image, image, image, sequence, sequence, InputTensor((draw(SIZES),)), tokens]))
    start = filters.Tensor((batch_size, *given_.shape), given_.vocabulary is not None)
    nodes, _ = Drawing(draw, batch_size).chain(start, 4)
    return Plan((given_,), chain(*nodes)), batch_size


def walked(plan: Plan, batch_size: int) -> str | tuple[int, ...]:
    start = filters.Tensor((batch_size, *plan.inputs[0].shape), plan.inputs[0].vocabulary is not None)
    try:
        return filters._Walk(batch_size).node(plan.root, start, "").shape
    except filters.Violation as violation:
        return str(violation)


@pytest.mark.filterwarnings("ignore:input's size at dim=1 does not match num_features")
def test_a_chain_of_layers_is_accepted_if_and_only_if_it_runs() -> None:
    seen: Counter[bool] = Counter()

    @settings(PROPERTY, max_examples=200)
    @given(plans())
    def holds(drawn: tuple[Plan, int]) -> None:
        plan, batch_size = drawn
        found = walked(plan, batch_size)
        on_meta, on_cpu = chain_refused(plan, batch_size, "meta"), chain_refused(plan, batch_size, "cpu")
        # Meta kernels let pass what real ones refuse: a Softmax over a dimension that is not there, a negative padding.
        # Never the reverse: so what holds on both is what a card does.
        truth = on_cpu if isinstance(on_cpu, str) else on_meta
        seen[not isinstance(truth, str)] += 1
        if isinstance(truth, str):
            assert isinstance(found, str), (found, truth)
        else:
            assert found == tuple(truth), (found, truth)

    holds()
    assert min(seen[True], seen[False]) >= 0.2 * seen.total(), seen


# --- what a rejection says -------------------------------------------------------------------------------------------

SETUP = TrainingSetup(batch_size=8)
MLP = {"arch": "pyramid", "input_features": 8, "output_features": 2, "depth": 2}
CNN = {"arch": "uniform", "input_channels": 3, "input_size": 8, "num_classes": 2, "depth": 4, "base_filters": 4}
TRANSFORMER = {
    "kind": "encoder",
    "vocabulary": 9,
    "embedding_size": 6,
    "layers": 1,
    "heads": 4,
    "feed_forward_size": 5,
    "sequence_length": 3,
}


def reason_of(family: str, network: dict[str, Any], **setup: Any) -> str:
    verdict = filters.check(make_spec(family, network, replace(SETUP, **setup)))
    assert isinstance(verdict, filters.Rejected), verdict
    return verdict.reason


def test_a_norm_rejects_the_batch_that_leaves_it_one_value() -> None:
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
        "MultiheadAttention at '2.self_attn': expected embed_dim % num_heads == 0, found embed_dim=6, num_heads=4"
    )
    assert reason_of("transformer", {**TRANSFORMER, "kind": "decoder"}) == (
        "CausalSelfAttention at '2.0.body.0': expected size % heads == 0, found size=6, heads=4"
    )
    vgg = {"template": "vgg", "stages": [[4, 1]], "input_size": 2, "num_classes": 2, "kernel_size": 5, "padding": 0}
    assert reason_of("template", vgg) == (
        "Conv2d at '0.0': expected H1 + 2 * padding >= dilation * (kernel_size - 1) + 1, "
        "found H1=2, dilation=1, kernel_size=5, padding=0"
    )


@pytest.mark.parametrize(
    ("node", "shape", "sentence"),
    [
        (
            layer("Linear", in_features=3, out_features=1),
            (2, 4),
            "Linear at '0': expected F == in_features, found F=4, in_features=3",
        ),
        (layer("Flatten"), (2,), "Flatten at '0': expected len(S) >= 1, found S=()"),
        (
            layer("Conv2d", in_channels=1, out_channels=1, kernel_size=1),
            (2, 4),
            "Conv2d at '0': expected an input of shape (N, C, H1, W1), found (2, 4)",
        ),
        (
            layer("Embedding", num_embeddings=3, embedding_dim=2),
            (2, 4),
            "Embedding at '0': expected tokens, found numbers",
        ),
        (
            layer("Linear", in_features=4),
            (2, 4),
            "Linear at '0': expected the arguments ['bias', 'in_features', 'out_features'], found ['in_features']",
        ),
        (
            layer("MaxPool2d", kernel_size=2, dilation=2),
            (2, 1, 4, 4),
            "MaxPool2d at '0': expected the arguments ['kernel_size', 'padding', 'stride'], "
            "found ['dilation', 'kernel_size']",
        ),
    ],
)
def test_layers_say_what_they_expected(node: Node, shape: tuple[int, ...], sentence: str) -> None:
    assert walked(Plan((InputTensor(shape[1:]),), chain(node)), shape[0]) == sentence


def test_a_layer_without_a_process_is_rejected_by_name() -> None:
    found = walked(Plan((InputTensor((4,)),), chain(layer("Bilinear"))), 2)
    assert str(found).startswith("Bilinear at '0': the specification has no such layer, it has ['AdaptiveAvgPool2d'")


# --- training rules --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setup", "sentence"),
    [
        ({"optimizer": "Adan"}, "no optimizer Adan: choose one of ['ASGD', 'Adadelta',"),
        ({"optimizer": "LBFGS"}, "LBFGS runs the training step several times a step, which a spec cannot say"),
        ({"optimizer": "Muon(lr=0.1)"}, "Muon takes matrices only, and these networks have biases"),
        ({"optimizer": "SparseAdam"}, "SparseAdam takes sparse gradients only, and these networks have dense ones"),
        (
            {"optimizer": "RMSprop(fused=True)"},
            "RMSprop takes ['alpha', 'centered', 'eps', 'lr', 'maximize', 'momentum', 'weight_decay'] here, "
            "found ['fused']",
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
def test_a_training_that_cannot_run_is_rejected_in_a_sentence(setup: dict[str, Any], sentence: str) -> None:
    assert reason_of("mlp", MLP, **setup).startswith(sentence)


def test_bce_is_rejected_under_autocast() -> None:
    found = reason_of("mlp", {**MLP, "head": "sigmoid"}, loss="bce", autocast="bf16")
    assert found == "torch refuses the loss bce under autocast: use bce_with_logits"


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
        if call == "Adam(decoupled_weight_decay=True)":  # AdamW by another name, which torch had not always
            continue
        verdict = filters.check(make_spec("mlp", MLP, replace(SETUP, optimizer=call)))
        assert isinstance(verdict, filters.Rejected) == optimizer_refuses(call), (call, verdict)
        seen[isinstance(verdict, LayerTable)] += 1
    assert seen[True] >= 5
    assert seen[False] >= 5


@pytest.mark.parametrize("name", sorted(optimizers.OPTIMIZERS))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_implementation_is_accepted_if_and_only_if_the_class_has_it(name: str, implementation: str) -> None:
    verdict = filters.check(make_spec("mlp", MLP, replace(SETUP, optimizer=name, implementation=implementation)))
    argument = {"foreach": "foreach", "single": "foreach", "fused": "fused"}.get(implementation)
    takes_it = argument is None or argument in inspect.signature(getattr(torch.optim, name)).parameters
    assert isinstance(verdict, LayerTable) == takes_it


def test_every_argument_of_the_optimizers_is_tried() -> None:
    assert {item for rule in optimizers.OPTIMIZERS.values() for item in rule.arguments} == ARGUMENTS.keys()


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop"])
@pytest.mark.parametrize("implementation", ["single", "fused"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_scaled_losses_and_fp16_gradients(optimizer: str, implementation: str, dtype: str) -> None:
    """A GradScaler, which comes with autocast in fp16, unscales gradients in fp16 inside of fused optimizers only."""
    setup = replace(SETUP, optimizer=optimizer, implementation=implementation, dtype=dtype, autocast="fp16")
    spec = make_spec("mlp", MLP, setup)
    verdict = filters.check(spec)
    try:
        module = subject.build_subject(plan_of(spec), dtype, "cpu")
        made = training.make_optimizer(optimizer, {}, implementation, module.parameters())
        inputs = subject.make_inputs(plan_of(spec), 8, dtype, "cpu")
        training.train_step(module, made, [inputs], "cross_entropy", "fp16", torch.amp.GradScaler("cpu"))
    except (*REFUSALS, TypeError) as error:
        assert isinstance(verdict, filters.Rejected), error
    else:
        assert isinstance(verdict, LayerTable)


# --- the specification as a text -------------------------------------------------------------------------------------


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


def test_the_listing_of_a_linear_layer() -> None:
    assert (
        "process Linear (Input = [*B, F]: set of nat; default bias = True)\n"
        "pre  F == in_features\n"
        "post Output = (*B, out_features)\n"
        "end_process"
    ) in listing()
