"""The shape specification accepts a layer or a random chain of layers if and only if torch runs it."""

import random
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vramcast.jobs import filters, subject
from vramcast.jobs.families import blocks
from vramcast.jobs.plan import InputTensor, Node, Plan, chain, layer

REFUSALS = (RuntimeError, ValueError, IndexError, AssertionError, ZeroDivisionError)

# --- the oracle ------------------------------------------------------------------------------------------------------

# Torch also accepts inputs without a batch: a single image, a sequence that is broadcast.
# In a plan the batch is always first, so the specification accepts only the ranks below.
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
    """Return the output's shape, or the reason why forward and backward do not run."""
    try:
        module = subject.build_subject(plan, device=device)
        for part in module.modules():
            if not list(part.children()) or type(part) in RANKS:
                part.register_forward_pre_hook(_batch_first)
        output = module(*subject.make_inputs(plan, batch_size, device=device))
        if output.requires_grad:  # a chain without parameters has nothing to train
            output.sum().backward()
    except REFUSALS as error:
        return f"{type(error).__name__}: {error}"
    shape: torch.Size = output.shape
    return shape


def walked(plan: Plan, batch_size: int) -> str | tuple[int, ...]:
    start = filters.TensorShape((batch_size, *plan.inputs[0].shape), plan.inputs[0].vocabulary is not None)
    try:
        return filters._Walk(batch_size).node(plan.root, start, "").shape
    except filters.Violation as violation:
        return str(violation)


# --- each layer alone ------------------------------------------------------------------------------------------------

# Each layer alone: input shapes, then the values of every argument; torch must reject zeros and negatives.
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
        truth, result = chain_refused(plan, shape[0], "cpu"), walked(plan, shape[0])
        agree = isinstance(result, str) if isinstance(truth, str) else result == tuple(truth)
        assert agree, (shape, args, result, truth)


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
        truth, result = chain_refused(plan, shape[0], "cpu"), walked(plan, shape[0])
        assert isinstance(result, str) if isinstance(truth, str) else result == tuple(truth), (plan, result, truth)


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
            result = None
        except filters.Violation as violation:
            result = str(violation)
        assert (result is None) == (not isinstance(truth, str)), (result, truth)
        accepted += result is None
    assert (accepted > 0) != flat_memory


# --- random chains of layers -----------------------------------------------------------------------------------------

counts = st.integers
SIZES = counts(1, 4)
DROPOUTS = st.sampled_from([0.0, 0.25])
IMAGE = ("Conv2d", "MaxPool2d", "AvgPool2d", "AdaptiveAvgPool2d", "BatchNorm2d", "InstanceNorm2d")
SEQUENCE = ("LearnedPositions", "MeanOverSequence", "CausalSelfAttention", "TransformerEncoderLayer")
NORMS = ("BatchNorm1d", "GroupNorm", "LayerNorm")
ANY = ("Linear", *NORMS, "PReLU", "Dropout", "Softmax", "Flatten", "Identity", "ReLU", "GELU")
COMPOSITES = ("Residual", "Residual", "DenseBlock", "Sequential", "CheckpointedSequential")


class Drawing:
    """Draws layers that mostly fit the preceding shape."""

    def __init__(self, draw: st.DrawFn, batch_size: int) -> None:
        self.draw = draw
        self.batch_size = batch_size

    def near(self, right: int) -> int:
        return right if self.draw(counts(0, 9)) else self.draw(SIZES)

    def chain(self, x: filters.TensorShape, longest: int, nested: int = 0) -> tuple[list[Node], filters.TensorShape]:
        nodes = []
        for _ in range(self.draw(counts(1, longest))):
            nodes.append(self.node(x, nested))
            with suppress(filters.Violation):  # the shape is only a hint for the next layer; torch decides
                x = filters._Walk(self.batch_size).node(nodes[-1], x, "")
        return nodes, x

    def node(self, x: filters.TensorShape, nested: int) -> Node:
        fitting = {4: IMAGE, 3: SEQUENCE}.get(len(x.shape), ANY)
        kinds = fitting + ANY + (() if nested > 1 else COMPOSITES)
        kind = self.draw(st.sampled_from(kinds if self.draw(counts(0, 19)) else (*IMAGE, *SEQUENCE, "Embedding")))
        if x.tokens and self.draw(counts(0, 9)):
            kind = "Embedding"
        return self.composite(kind, x, nested) if kind in COMPOSITES else layer(kind, **self.arguments(kind, x.shape))

    def composite(self, kind: str, x: filters.TensorShape, nested: int) -> Node:
        if kind == "Residual":
            body, out = self.chain(x, 2, nested + 1)
            other = [layer("Identity")] if self.draw(st.booleans()) else self.chain(x, 2, nested + 1)[0]
            if self.draw(st.booleans()) and len(x.shape) == len(out.shape) == 4:
                other = [layer("Conv2d", in_channels=x.shape[1], out_channels=out.shape[1], kernel_size=1)]
            return Node(kind, {"shortcut_first": self.draw(st.booleans())}, (chain(*body), chain(*other)))
        if kind == "DenseBlock":
            return Node(kind, {}, tuple(self.growth(x, k) for k in range(self.draw(counts(0, 3)))))
        return Node(kind, {}, tuple(self.chain(x, 3, nested + 1)[0]))

    def growth(self, x: filters.TensorShape, k: int) -> Node:
        """Return a layer that adds a channel to a dense block."""
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
        arguments: dict[str, dict[str, Any]] = {
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
        return arguments.get(kind, {})

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
    first_input = draw(st.sampled_from([image, image, image, sequence, sequence, InputTensor((draw(SIZES),)), tokens]))
    start = filters.TensorShape((batch_size, *first_input.shape), first_input.vocabulary is not None)
    nodes, _ = Drawing(draw, batch_size).chain(start, 4)
    return Plan((first_input,), chain(*nodes)), batch_size


@pytest.mark.filterwarnings("ignore:input's size at dim=1 does not match num_features")
def test_a_chain_of_layers_is_accepted_if_and_only_if_it_runs() -> None:
    seen: Counter[bool] = Counter()

    @settings(settings.get_profile("torch"), max_examples=200)
    @given(plans())
    def holds(drawn: tuple[Plan, int]) -> None:
        plan, batch_size = drawn
        result = walked(plan, batch_size)
        on_meta, on_cpu = chain_refused(plan, batch_size, "meta"), chain_refused(plan, batch_size, "cpu")
        # Meta kernels accept some calls that real ones reject: a Softmax over a missing dimension, a negative padding.
        # They never reject what real ones accept, so a GPU runs what both accept.
        truth = on_cpu if isinstance(on_cpu, str) else on_meta
        seen[not isinstance(truth, str)] += 1
        if isinstance(truth, str):
            assert isinstance(result, str), (result, truth)
        else:
            assert result == tuple(truth), (result, truth)

    holds()
    assert min(seen[True], seen[False]) >= 0.2 * seen.total(), seen


# --- reasons of rejections -------------------------------------------------------------------------------------------


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
def test_a_rejection_states_what_the_layer_expected(node: Node, shape: tuple[int, ...], sentence: str) -> None:
    assert walked(Plan((InputTensor(shape[1:]),), chain(node)), shape[0]) == sentence


def test_a_layer_without_a_process_is_rejected_by_name() -> None:
    result = walked(Plan((InputTensor((4,)),), chain(layer("Bilinear"))), 2)
    assert str(result).startswith("Bilinear at '0': expected a layer of ['AdaptiveAvgPool2d'")
