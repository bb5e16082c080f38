"""The rules that make a step on meta allocate what CUDA would, each on networks small enough to check by hand."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from meta_traces import BFLOAT, HALF, SINGLE, numbers, on_meta, peak_bytes, told, traced, transformer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vramcast.errors import UserError
from vramcast.jobs.analysis.optimizers import OPTIMIZERS, state_elements
from vramcast.virtual_gpu.operators.cuda_paths import cuda_paths
from vramcast.virtual_gpu.operators.kernels import cuda_kernels
from vramcast.virtual_gpu.replay.replay import FREE
from vramcast.virtual_gpu.tracing.session import trace_training
from vramcast.virtual_gpu.tracing.trace import Trace, Tracer, Use
from vramcast.virtual_gpu.training.setup import TrainingSetup
from vramcast.virtual_gpu.training.step import make_optimizer

# Golden traces


def test_golden_perceptron() -> None:
    net = on_meta(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    x = numbers(16, 4)
    optimizer = torch.optim.SGD(net.parameters(), foreach=True)

    def step() -> None:
        net(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert told(step, x, *net.parameters()) == [
        512, "cublas", "cublaslt",  # 16 x 8 x 4 bytes; cuBLAS keeps its workspace, cublasLt takes it for the call
        512, -512,  # ReLU keeps its output, and its input dies
        128, "cublaslt", 4, -128, 4,  # 16 x 2, its sum, and the gradient of that
        512, "cublas", 128, -128, 64, 128, -128, 8,  # the other thread's workspace; gradients of input, weight, bias:
        # cuBLAS cannot read the gradient of a sum, one number with strides of 0, so each product copies it
        512, -512, -512,  # through ReLU, whose saved output dies with the gradient
        128, 32, -512, -4, -4,  # the first layer's weight and bias; its input wants no gradient
        -128, -32, -64, -8,  # SGD works in place; zero_grad frees
    ]  # fmt: skip


def test_golden_convolution() -> None:
    net, x = on_meta(lambda: nn.Conv2d(3, 8, 3)), numbers(2, 3, 8, 8)
    story = told(lambda: net(x).sum().backward(), x, *net.parameters())
    # 2 x 8 x 6 x 6 out, workspace for the call; then a contiguous copy of the gradient, whose strides are 0, the weight
    # (8 x 3 x 3 x 3) with its workspace, and the bias
    assert story == [2304, "forward", 4, -2304, 4, 2304, 864, "weight", -2304, 32, -4, -4]


def test_golden_dropout() -> None:
    x = numbers(10, 10, grad=True)
    # a mask of one byte an element, then the output; the mask dies after the gradient is made
    assert told(lambda: F.dropout(x, 0.5).sum().backward(), x) == [100, 400, 4, -400, 4, 400, -100, -4, -4]


def test_golden_softmax() -> None:
    x = numbers(10, 10, grad=True)
    # in the backward pass the product of gradient and output, beside what is made of it
    assert told(lambda: F.softmax(x, 1).sum().backward(), x) == [400, 4, 4, 400, 400, -400, -400, -4, -4]
    y = numbers(10, 10, grad=True)
    # a logarithm's needs the copy alone
    assert told(lambda: F.log_softmax(y, 1).sum().backward(), y) == [400, 4, 4, 400, 400, -400, -400, -4, -4]


@pytest.mark.skipif(not hasattr(torch.ops.aten, "_fused_rms_norm"), reason="this torch has no fused RMS norm")
def test_golden_rms_norm() -> None:
    x, weight = numbers(10, 16, grad=True), numbers(16, grad=True)
    # the output, and a scale for each row; then a copy of the sum's gradient, and the gradients of input and weight
    assert told(lambda: F.rms_norm(x, [16], weight).sum().backward(), x, weight) == [
        640, 40, 4, -640, 4, 640, 640, 64, -640, -40, -4, -4,
    ]  # fmt: skip
    # a weight of another dtype has no fused kernel (native/layer_norm.cpp)
    half = numbers(16, dtype=torch.bfloat16)
    assert len(told(lambda: F.rms_norm(x, [16], half), x, half)) > 2


def test_golden_attention() -> None:
    q, k, v = (numbers(2, 4, 64, 32, grad=True) for _ in range(3))
    one, rows = 2 * 4 * 64 * 32 * 4, 2 * 4 * 64 * 4
    tile = 2 * 4 * (64 * 64 * 4 + 16)
    assert told(lambda: F.scaled_dot_product_attention(q, k, v).sum().backward(), q, k, v) == [
        one, rows, 4, 4,  # output, logsumexp; the sum and its gradient
        one, one, one,  # gradients
        one, rows, rows, -rows, -one,  # grad * out, summed over a row, transposed
        tile, -tile, -rows, -rows, -one,  # workspace; what was saved dies
        one, -one, one, -one, one, -one,  # leaves want their own layout
        -4, -4,
    ]  # fmt: skip


# Dropout, in-place operations, views, accumulation


@pytest.mark.parametrize(
    ("p", "train", "born"), [(0.0, True, []), (0.5, False, []), (0.5, True, [100, 400]), (1.0, True, [400])]
)
def test_dropout(p: float, train: bool, born: list[int]) -> None:
    x = numbers(10, 10, grad=True)
    kept = []
    assert told(lambda: kept.append(F.dropout(x, p, train)), x) == born


def test_views_and_operations_in_place_give_birth_to_nothing() -> None:
    x = numbers(4, 6)

    def step() -> None:
        x.view(6, 4).transpose(0, 1)[1:].add_(1.0).mul_(x[0, :1])
        F.relu(x, inplace=True)

    assert told(step, x) == []


def test_gradients_are_born_once_however_many_passes_add_up() -> None:
    net, x = on_meta(lambda: nn.Linear(4, 8, bias=False)), numbers(16, 4)

    def step() -> None:
        net(x).sum().backward()
        net(x).sum().backward()

    story = told(step, x, *net.parameters())
    assert story.count(128) - story.count(-128) == 1  # the first pass's gradient stays
    assert story.count(128) == 2  # the second one's is added to it and dies


class Branches(nn.Module):
    """Gradients that arrive at one place by several ways, some of them shared."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x)
        return self.second(hidden) + self.first(hidden) + hidden


class Watcher(Tracer):
    """Notes whether each sum of gradients was made in place."""

    def __init__(self) -> None:
        super().__init__(cuda_kernels())
        self.sums: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten.add.Tensor:
            self.sums.append(out is args[0])
        return out


@pytest.mark.parametrize(
    ("make", "shape"),
    [(Branches, (4, 8)), (lambda: nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), (2, 5, 16))],
)
def test_gradients_add_up_in_place_where_torch_adds_in_place(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    loss = make()(torch.randn(shape, requires_grad=True)).sum()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss.backward()
    found = sorted(profile.events(), key=lambda event: event.time_range.start)
    theirs = [event.name == "aten::add_" for event in found if event.name in ("aten::add", "aten::add_")]
    net, x, watcher = on_meta(make), numbers(*shape, grad=True), Watcher()
    with cuda_paths(), watcher:
        out = net(x).sum()
        watcher.sums.clear()
        out.backward()
    assert watcher.sums == theirs
    assert True in theirs


class Tied(nn.Module):
    """An output layer that shares its weight with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4096, 64)

    def forward(self, x: Tensor) -> Any:
        return F.linear(self.embedding(x), self.embedding.weight)


def test_a_tied_weight_takes_two_gradients_and_their_sum_beside_the_accumulated_one() -> None:
    whole = 4096 * 64 * 4
    net, x = Tied(), torch.zeros(1, 8, dtype=torch.long)
    net(x).sum().backward()
    loss = net(x).sum()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        loss.backward()
    kineto: Any = profile.profiler
    events = [item for item in kineto.kineto_results.events() if item.name() == "[memory]"]
    sizes = [item.nbytes() for item in sorted(events, key=lambda item: item.start_ns())]
    assert max(itertools.accumulate(sizes)) // whole == 3  # what torch does without a mode
    setups = [TrainingSetup(batch_size=1, loss="cross_entropy", optimizer="SGD", accumulate=n) for n in (1, 2)]
    once, twice = (
        peak_bytes(
            trace_training(on_meta(Tied), lambda n: (torch.zeros(n, 8, dtype=torch.long, device="meta"),), setup)
        )
        for setup in setups
    )
    assert (once // whole, twice // whole) == (1 + 3, 1 + 1 + 3)  # the weight, the accumulated gradient, and the three


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_checkpointing_recomputes(reentrant: bool, dtype: str | None) -> None:
    class Blocks(nn.Module):
        def __init__(self, checkpointing: bool) -> None:
            super().__init__()
            self.checkpointing = checkpointing
            self.first = nn.Linear(64, 64)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)
            )

        def forward(self, x: Tensor) -> Any:
            x = self.first(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant) if self.checkpointing else block(x)
            return x

    setup = TrainingSetup(batch_size=512, loss="mse", optimizer="SGD", autocast=dtype)
    plain, saved = (
        trace_training(on_meta(lambda c=c: Blocks(c)), lambda n: (numbers(n, 64),), setup) for c in (False, True)
    )
    element = 2 if dtype else 4
    hidden = 512 * 256 * element  # what a block saves: the input and the output of its activation

    def count(trace: Trace) -> int:
        return sum(size == hidden for _, size in trace.events)

    assert count(saved) > count(plain) > 0  # in the dtype of autocast, in the recomputation too
    # beside the last block, which is recomputed while all else waits, three blocks save two hidden tensors each
    assert peak_bytes(plain) - peak_bytes(saved) > 4 * hidden


# Normalisation, pooling, embedding, recurrence


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [SINGLE, HALF, BFLOAT])
def test_batch_norm(layout: torch.memory_format, dtype: torch.dtype) -> None:
    net = on_meta(lambda: nn.BatchNorm2d(6))
    x = numbers(2, 6, 4, 4, dtype=dtype).to(memory_format=layout).requires_grad_()
    made: list[Tensor] = []
    story = told(lambda: made.append(net(x)), x, *net.parameters(), *net.buffers())
    assert story == [2 * 6 * 16 * dtype.itemsize, 24, 24]  # output; mean and deviation in single precision
    assert made[0].dtype == dtype
    assert made[0].is_contiguous(memory_format=layout)
    story = told(lambda: made[0].sum().backward(), x, made[0], *net.parameters())
    assert story.count(24) == 2
    assert net.weight.grad is not None
    assert net.weight.grad.dtype == SINGLE


def test_max_pooling_keeps_indices_of_eight_bytes() -> None:
    x = numbers(1, 2, 8, 8, grad=True)
    kept: list[Tensor] = []
    assert told(lambda: kept.append(F.max_pool2d(x, 2)), x) == [2 * 16 * 4, 2 * 16 * 8]


@pytest.mark.parametrize(("tokens", "sorted_"), [(3072, False), (3073, True)])
def test_embedding_sorts_many_tokens(tokens: int, sorted_: bool) -> None:
    net, x = on_meta(lambda: nn.Embedding(100, 16)), torch.zeros(tokens, dtype=torch.int64, device="meta")
    story = told(lambda: net(x).sum().backward(), x, *net.parameters())
    assert story.count(100 * 16 * 4) == 1
    assert story.count(tokens * 8) == (4 if sorted_ else 0)  # sorted, original, a range, and starts of segments
    assert ((tokens // 10 + 100) * 32 * 4 in story) == sorted_  # sums of segments, a warp wide


@pytest.mark.parametrize(("kind", "kept"), [(nn.LSTM, 6), (nn.GRU, 5), (nn.RNN, 2)])
@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_recurrent_layers_are_one_call(kind: type[nn.Module], kept: int, dtype: str | None) -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer: nn.Module = kind(8, 16, 2, batch_first=True, bidirectional=True)
            self.output = nn.Linear(32, 5)

        def forward(self, x: Tensor) -> Any:
            return self.output(self.layer(x)[0])

    setup = TrainingSetup(batch_size=3, loss="cross_entropy", autocast=dtype)
    trace = trace_training(on_meta(Tagger), lambda n: (numbers(n, 10, 8),), setup)
    element = 2 if dtype else 4
    births = [size for _, size in trace.events]
    assert 3 * 10 * 32 * element in births  # output
    assert 2 * 2 * 10 * 3 * 16 * kept * element in births  # layers, directions, steps, batch
    assert trace.approximations == {"the reserve of cuDNN's recurrent layers is estimated"}


# Optimizers

CASES = [(name, how) for name, rule in OPTIMIZERS.items() for how in rule.implementations]


@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_optimizers_leave_the_state_that_static_analysis_counts(name: str, implementation: str) -> None:
    shapes = [(50, 40), (7, 11), (13,)]
    setup = TrainingSetup(batch_size=1, optimizer=name, implementation=implementation)
    parameters = [nn.Parameter(numbers(*shape)) for shape in shapes]
    for item in parameters:
        item.grad = torch.empty_like(item)

    def step() -> None:
        how = {"default": "single" if name == "Adafactor" else "foreach"}.get(implementation, implementation)
        kept.append(make_optimizer(name, {}, how, parameters))
        kept[0].step()

    kept: list[torch.optim.Optimizer] = []
    gradients = [item.grad for item in parameters]
    trace = traced(step, *parameters, *gradients, phase=Use.OPTIMIZER_STATE)
    sizes = dict(event for event in trace.events if event[1] >= 0)
    dead = {block for block, size in trace.events if size == FREE}
    left = sum(size for block, size in sizes.items() if block not in dead)
    state = state_elements(setup, shapes) * 4
    assert left == state
    temporaries = peak_bytes(trace) - state
    everything, largest = 4 * sum(item.numel() for item in parameters), 4 * 50 * 40
    if implementation == "fused":
        assert temporaries == 0
    elif name in ("Adam", "AdamW"):
        # foreach: the root of all second moments; one by one: that of one parameter, and its quotient
        assert temporaries == (2 * largest if implementation == "single" else everything)
    else:
        assert temporaries <= 4 * everything


def test_session_runs_adafactor_one_by_one() -> None:
    """torch does so by default, for its memory (torch/optim/_adafactor.py)."""
    setup = TrainingSetup(batch_size=8, loss="mse", optimizer="Adafactor")
    default, single, foreach = (
        trace_training(
            on_meta(lambda: nn.Linear(64, 64)),
            lambda n: (numbers(n, 64),),
            TrainingSetup(**{**setup.__dict__, "implementation": how}),
        )
        for how in ("default", "single", "foreach")
    )
    assert default.events == single.events != foreach.events


# What cannot be traced


@pytest.mark.parametrize(
    ("forward", "named"),
    [
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x * x.sum().item(), "_local_scalar_dense"),
        (lambda x: x[x > 0], "index"),
    ],
)
def test_operators_that_need_data_are_named(forward: Callable[[Tensor], Any], named: str) -> None:
    with pytest.raises(UserError, match=rf"{named}.*measure this network on a GPU"):
        traced(lambda: forward(numbers(3)))


def test_shapes_that_do_not_fit_are_told_by_torch() -> None:
    net = on_meta(lambda: nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match=r"shape|dim"):
        traced(lambda: net(numbers(2, 5)))
    image = on_meta(lambda: nn.Conv2d(3, 4, 3))
    with pytest.raises(RuntimeError, match="channel"):
        traced(lambda: image(numbers(2, 5, 8, 8)))


def test_transposed_convolutions_are_convolutions_the_other_way_round() -> None:
    net, x = on_meta(lambda: nn.ConvTranspose2d(3, 8, 3)), numbers(2, 3, 8, 8, grad=True)
    story = told(lambda: net(x).sum().backward(), x, *net.parameters())
    assert [item for item in story if isinstance(item, str)] == ["data", "forward", "weight"]


def test_the_same_answer_on_every_run() -> None:
    setup = TrainingSetup(batch_size=4, autocast="fp16", optimizer="AdamW", loss="cross_entropy")
    first, second = (trace_training(on_meta(transformer), lambda n: (numbers(n, 5, 16),), setup) for _ in range(2))
    assert first.events == second.events
    assert first.uses == second.uses
    assert {Use(use) for use in first.uses} >= {Use.GRADIENTS, Use.OPTIMIZER_STATE, Use.ACTIVATIONS}


def test_nothing_of_a_step_outlives_it() -> None:
    """Over all layouts of setup: what one steady step leaves, the next frees."""
    for dtype, accumulate in itertools.product((None, "bf16"), (1, 2)):
        setup = TrainingSetup(batch_size=4, last_batch_size=2, autocast=dtype, accumulate=accumulate)
        trace = trace_training(on_meta(transformer), lambda n: (numbers(n, 5, 16),), setup)
        births = [block for block, size in trace.events if size != FREE]
        deaths = [block for block, size in trace.events if size == FREE]
        assert len(births) == len(set(births))
        assert len(deaths) == len(set(deaths))
