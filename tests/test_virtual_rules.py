"""The rules that make a step on meta allocate what CUDA would, each on networks small enough to check by hand."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dataset_builder.analysis.optimizers import OPTIMIZERS, state_elements
from dataset_builder.errors import UserError
from dataset_builder.measure.virtual import autocast as rules
from dataset_builder.measure.virtual.attention import efficient_workspace_bytes
from dataset_builder.measure.virtual.autocast import MetaScaler, autocast
from dataset_builder.measure.virtual.composites import cuda_paths
from dataset_builder.measure.virtual.kernels import cuda_kernels
from dataset_builder.measure.virtual.replay import FREE
from dataset_builder.measure.virtual.session import trace_training
from dataset_builder.measure.virtual.trace import LibraryCall, Trace, Tracer, Use, call_of
from dataset_builder.schema import TrainingSetup
from dataset_builder.training import make_optimizer

HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32


def on_meta(make: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return make()


def numbers(*shape: int, dtype: torch.dtype = SINGLE, grad: bool = False) -> Tensor:
    return torch.randn(shape, device="meta", dtype=dtype).requires_grad_(grad)


def traced(step: Callable[[], Any], *known: Tensor, capability: float = 8.0, phase: Use = Use.ACTIVATIONS) -> Trace:
    """The trace of a function, in which some tensors lived before."""
    tracer = Tracer(cuda_kernels(capability))
    tracer.phase = phase
    for item in known:
        tracer.see(item.detach())
    tracer.trace.events.clear()
    with cuda_paths(capability), tracer:
        step()
    return tracer.trace


def told(step: Callable[[], Any], *known: Tensor, capability: float = 8.0) -> list[Any]:
    """Births as positive sizes, deaths as negative ones, library calls by name."""
    trace = traced(step, *known, capability=capability)
    story: list[Any] = []
    sizes: dict[int, int] = {}
    for block, size in trace.events:
        index = call_of(size)
        if index is not None:
            call = trace.calls[index]
            story.append(call.library if isinstance(call, LibraryCall) else call.direction)
        elif size != FREE:
            sizes[block] = size
            story.append(size)
        elif block in sizes:
            story.append(-sizes[block])
    return [item for item in story if item != 0]


def peak_bytes(trace: Trace) -> int:
    live: dict[int, int] = {}
    peak = 0
    for block, size in trace.events:
        if size == FREE:
            live.pop(block, None)
        else:
            live[block] = max(size, 0)
            peak = max(peak, sum(live.values()))
    return peak


class Recorder(TorchDispatchMode):
    """The operators that reach the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def operators(step: Callable[[], Any], capability: float = 8.0) -> list[str]:
    with cuda_paths(capability), Recorder() as recorder:
        step()
    return recorder.names


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
        512, "cublas", 64, 8,  # the other thread's workspace; gradients of input, weight, bias
        512, -512, -512,  # through ReLU, whose saved output dies with the gradient
        128, 32, -512, -4, -4,  # the first layer's weight and bias; its input wants no gradient
        -128, -32, -64, -8,  # SGD works in place; zero_grad frees
    ]  # fmt: skip


def test_golden_convolution() -> None:
    net, x = on_meta(lambda: nn.Conv2d(3, 8, 3)), numbers(2, 3, 8, 8)
    story = told(lambda: net(x).sum().backward(), x, *net.parameters())
    # 2 x 8 x 6 x 6 out, workspace for the call; then the weight (8 x 3 x 3 x 3) with its workspace, and the bias
    assert story == [2304, "forward", 4, -2304, 4, 864, "weight", 32, -4, -4]


def test_golden_dropout() -> None:
    x = numbers(10, 10, grad=True)
    # a mask of one byte an element, then the output; the mask dies after the gradient is made
    assert told(lambda: F.dropout(x, 0.5).sum().backward(), x) == [100, 400, 4, -400, 4, 400, -100, -4, -4]


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


# Attention


def attention_kernel(q: Tensor, capability: float, **arguments: Any) -> str:
    keys = q if "kv" not in arguments else arguments.pop("kv")
    names = operators(lambda: F.scaled_dot_product_attention(q, keys, keys, **arguments), capability)
    kinds = {"_scaled_dot_product_flash_attention": "flash", "_scaled_dot_product_efficient_attention": "efficient"}
    return next((kinds[name] for name in names if name in kinds), "math")


@pytest.mark.parametrize(
    ("dtype", "size", "capability", "kernel"),
    [
        (SINGLE, 64, 8.0, "efficient"), (SINGLE, 30, 8.0, "math"), (SINGLE, 30, 7.5, "efficient"),
        (SINGLE, 64, 6.1, "efficient"),
        (HALF, 64, 8.0, "flash"), (BFLOAT, 64, 9.0, "flash"), (HALF, 256, 8.0, "flash"), (HALF, 264, 8.0, "efficient"),
        (HALF, 60, 8.0, "flash"), (HALF, 256, 8.6, "efficient"), (HALF, 192, 8.9, "flash"),
        (HALF, 64, 7.5, "efficient"), (HALF, 60, 7.5, "math"), (BFLOAT, 64, 7.5, "math"),
    ],
)  # fmt: skip
def test_attention_by_dtype_head_and_card(dtype: torch.dtype, size: int, capability: float, kernel: str) -> None:
    assert attention_kernel(numbers(2, 4, 16, size, dtype=dtype, grad=True), capability) == kernel


def test_attention_by_mask_and_groups() -> None:
    half, single = numbers(2, 4, 16, 64, dtype=HALF), numbers(2, 4, 16, 64)
    mask = torch.ones(16, 16, dtype=torch.bool, device="meta")
    assert attention_kernel(half, 8.0, is_causal=True) == "flash"
    assert attention_kernel(half, 8.0, attn_mask=mask) == "efficient"
    assert attention_kernel(half, 8.0, is_causal=True, kv=numbers(2, 4, 8, 64, dtype=HALF)) == "efficient"
    assert attention_kernel(half, 8.0, dropout_p=0.1) == "flash"
    grouped = numbers(2, 2, 16, 64, dtype=HALF)
    assert attention_kernel(half, 8.0, kv=grouped, enable_gqa=True) == "flash"
    assert attention_kernel(single, 8.0, kv=numbers(2, 2, 16, 64), enable_gqa=True) == "math"
    assert attention_kernel(numbers(4, 16, 64, dtype=HALF), 8.0) == "math"  # without a batch


def test_flash_attention() -> None:
    q, k, v = (numbers(2, 4, 100, 40, dtype=BFLOAT, grad=True) for _ in range(3))
    story = told(lambda: F.scaled_dot_product_attention(q, k, v).sum().backward(), q, k, v)
    assert story[:2] == [2 * 4 * 100 * 40 * 2, 2 * 4 * 100 * 4]
    assert 2 * 4 * 128 * 4 in story  # row sums, rows rounded to 128
    assert 2 * 128 * 4 * 64 * 4 in story  # gradient of the queries in single precision, heads rounded to 32


def test_flash_attention_pads_heads_to_eight() -> None:
    q, k, v = (numbers(2, 4, 100, 36, dtype=BFLOAT) for _ in range(3))
    story = told(lambda: F.scaled_dot_product_attention(q, k, v), q, k, v)
    assert story[:4] == [2 * 4 * 100 * 40 * 2] * 4


@pytest.mark.parametrize(
    ("dtype", "size", "capability", "expected"),
    [
        (SINGLE, 16, 8.0, 2 * (64 * 64 * 4 + 16)),  # a tile is 64 wide, however small the head
        (SINGLE, 128, 8.0, 2 * (128 * 64 * 4 + 16)),  # 100 rows are one tile of 128, and the head two of 64
        (SINGLE, 128, 8.6, 4 * (64 * 64 * 4 + 16)),  # too little shared memory for the large tile
        (SINGLE, 16, 6.1, 0),
        (HALF, 128, 8.0, 128 * 128 * 4 + 16),
        (HALF, 264, 8.0, 5 * (128 * 64 * 4 + 16) + 2 * 64 * 2 * 384 * 4),  # keys' and values' gradients, two splits
    ],
)
def test_workspace_of_efficient_attention(dtype: torch.dtype, size: int, capability: float, expected: int) -> None:
    q = numbers(2, 3, 100, size, dtype=dtype)
    assert efficient_workspace_bytes(q, q, q, capability) == 2 * 3 * expected


def test_bool_mask_becomes_a_padded_bias() -> None:
    q, mask = numbers(2, 4, 20, 64), torch.ones(20, 20, dtype=torch.bool, device="meta")
    story = told(lambda: F.scaled_dot_product_attention(q, q, q, attn_mask=mask), q, mask)
    assert story[:2] == [20 * 20 * 4, 20 * 20]  # the bias, and the mask's opposite that fills it
    assert 20 * 32 * 4 in story


def test_overrides_nest_and_are_undone() -> None:
    x = numbers(10, 10, grad=True)
    init = torch.autocast.__init__
    with cuda_paths():
        with cuda_paths(9.0):
            pass
        with Recorder() as inside:
            F.dropout(x, 0.5)
    with Recorder() as outside:
        F.dropout(x, 0.5)
    assert "native_dropout" in inside.names
    assert "native_dropout" not in outside.names
    assert torch.autocast.__init__ is init


# Autocast

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"


def listed(macro: str) -> set[str]:
    text = HEADER.read_text()
    body = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*\n)", text)
    assert body
    return {".".join(part.strip() for part in item.split(",")) for item in re.findall(r"_\(([\w, ]+)\)", body[1])}


@pytest.mark.skipif(not HEADER.is_file(), reason="this torch carries no headers")
def test_autocast_lists_are_those_of_the_header() -> None:
    if "AT_FORALL_LOWER_PRECISION_FP" not in HEADER.read_text():
        pytest.skip("an older header without lists")
    # registered apart from the lists, in autocast_mode.cpp
    cudnn = {"cudnn_convolution", "cudnn_convolution_transpose"}
    assert listed("AT_FORALL_LOWER_PRECISION_FP") | cudnn == set(rules.LOWER)
    assert listed("AT_FORALL_FP32") | {"linalg_matrix_sqrth"} == set(rules.SINGLE)  # newer, and apart from the list
    assert listed("AT_FORALL_FP32_SET_OPT_DTYPE") == set(rules.SINGLE_OUTPUT)
    assert listed("AT_FORALL_PROMOTE") == set(rules.WIDEST)


def test_autocast_lists_name_every_operator_that_torch_casts_on_cuda() -> None:
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    ours = {*rules.LOWER, *rules.SINGLE, *rules.SINGLE_OUTPUT, *rules.APPENDED, *rules.WIDEST, rules.BANNED}
    elsewhere = {"_cudnn_rnn"}  # on builds with cuDNN, see recurrent.py
    assert {name.removeprefix("aten::") for name in registered if name.startswith("aten::")} - elsewhere <= ours


X, Y = (3, 8), (8, 8)
TABLE: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    # https://docs.pytorch.org/docs/stable/amp.html, "CUDA Op-Specific Behavior"
    "matmul": (lambda a, b: a @ b, "lower"),
    "linear": (F.linear, "lower"),
    "addmm": (lambda a, b: torch.addmm(a, a, b), "lower"),
    "bmm": (lambda a, b: torch.bmm(a[None], b[None]), "lower"),
    "einsum": (lambda a, b: torch.einsum("ij,jk", a, b), "lower"),
    "conv1d": (lambda a, b: F.conv1d(a[None], a[None]), "lower"),
    "conv2d": (lambda a, b: F.conv2d(b[None, None], b[None, None]), "lower"),
    "conv_transpose2d": (lambda a, b: F.conv_transpose2d(b[None, None], b[None, None]), "lower"),
    "prelu": (lambda a, b: F.prelu(a, b[0]), "lower"),
    "attention": (lambda a, b: F.scaled_dot_product_attention(b[None, None], b[None, None], b[None, None]), "lower"),
    "softmax": (lambda a, b: a.softmax(-1), "single"),
    "log_softmax": (lambda a, b: F.log_softmax(a, -1), "single"),
    "layer_norm": (lambda a, b: F.layer_norm(a, (8,)), "single"),
    "group_norm": (lambda a, b: F.group_norm(a, 2), "single"),
    "cross_entropy": (lambda a, b: F.cross_entropy(a, torch.zeros(3, dtype=torch.int64, device=a.device)), "single"),
    "mse_loss": (lambda a, b: F.mse_loss(a, a), "single"),
    "bce_with_logits": (lambda a, b: F.binary_cross_entropy_with_logits(a, a), "single"),
    "exp": (lambda a, b: a.exp(), "single"),
    "log": (lambda a, b: a.log(), "single"),
    "pow": (lambda a, b: a**2, "single"),
    "norm": (lambda a, b: torch.norm(a), "single"),
    "cumsum": (lambda a, b: a.cumsum(0), "single"),
    "prod": (lambda a, b: a.prod(), "single"),
    "sum": (lambda a, b: a.sum(0), "single"),
    "addcmul": (lambda a, b: torch.addcmul(a, a, a.float()), "single"),
    "cat": (lambda a, b: torch.cat([a, a.float()]), "single"),
    "stack": (lambda a, b: torch.stack([a, a]), "same"),
    "relu": (lambda a, b: a.relu(), "same"),
    "gelu": (lambda a, b: F.gelu(a), "same"),
    "dropout": (lambda a, b: F.dropout(a), "same"),
    "add": (lambda a, b: a + a, "same"),
    "batch_norm": (lambda a, b: F.batch_norm(a, None, None, training=True), "same"),
    "max_pool": (lambda a, b: F.max_pool1d(a, 2), "same"),
    "explicit": (lambda a, b: a.softmax(-1, dtype=torch.float64).sum(dtype=torch.float16), "lower"),
}


@pytest.mark.parametrize("given", [SINGLE, HALF])
@pytest.mark.parametrize("name", TABLE)
def test_autocast_by_the_documented_table(name: str, given: torch.dtype) -> None:
    function, kind = TABLE[name]
    with autocast("fp16")():
        out = function(numbers(*X, dtype=given), numbers(*Y, dtype=given))
    assert out.dtype == {"lower": HALF, "single": SINGLE, "same": given}[kind]


def outputs_by_module(net: nn.Module, x: Tensor, context: Callable[[], Any]) -> dict[str, torch.dtype]:
    found: dict[str, torch.dtype] = {}
    for name, module in net.named_modules():
        module.register_forward_hook(
            lambda _, __, out, name=name: found.__setitem__(name, (out[0] if isinstance(out, tuple) else out).dtype)
        )
    with context():
        net(x)
    return found


def convolutional() -> nn.Module:
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(), *head)


def transformer() -> nn.Module:
    return nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.Linear(16, 4))


@pytest.mark.parametrize(("make", "shape"), [(convolutional, (2, 3, 8, 8)), (transformer, (2, 5, 16))])
def test_modules_come_out_as_under_the_autocast_of_the_cpu(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    ours = outputs_by_module(on_meta(make), numbers(*shape), autocast("bf16"))
    theirs = outputs_by_module(make(), torch.randn(shape), lambda: torch.autocast("cpu", BFLOAT))
    # on CUDA layer norm runs in single precision, on the CPU in the input's
    layer_norms = {name for name in ours if "norm" in name}
    assert {ours[name] for name in layer_norms} <= {SINGLE}
    assert {name: ours[name] for name in ours if name not in layer_norms | {"0"}} == {
        name: theirs[name] for name in theirs if name not in layer_norms | {"0"}
    }


def test_each_weight_is_cast_once_a_pass_and_forgotten_after_it() -> None:
    net, x = on_meta(lambda: nn.Linear(4, 4, bias=False)), numbers(2, 4)

    def twice() -> None:
        with autocast("bf16")():
            net(net(x))

    # one for the input and one for the weight; the hidden tensor is in lower precision already
    assert operators(twice).count("_to_copy") == 2
    assert operators(lambda: (twice(), twice())).count("_to_copy") == 4


def test_cast_weights_live_as_long_as_the_graph() -> None:
    net, x = on_meta(lambda: nn.Linear(64, 64, bias=False)), numbers(2, 64, grad=True)

    def step() -> None:
        with autocast("bf16")():
            out = net(x)
        out.sum().backward()

    story = told(step, x, *net.parameters())
    weight = 64 * 64 * 2
    # cast weight; its gradient in lower precision, cast to single; both lower ones die, the gradient stays
    assert [item for item in story if item in (weight, -weight, 2 * weight)] == [
        weight,
        weight,
        -weight,
        2 * weight,
        -weight,
    ]


def test_autocast_can_be_switched_off_inside() -> None:
    a, b = numbers(*X), numbers(*Y)
    with autocast("bf16")():
        with torch.autocast("cuda", enabled=False):
            assert (a @ b).dtype == SINGLE
        with torch.autocast("meta", dtype=HALF):
            assert (a @ b).dtype == HALF
        assert (a @ b).dtype == BFLOAT
    assert (a @ b).dtype == SINGLE


def test_autocast_refuses_what_torch_refuses() -> None:
    x = numbers(3)
    with autocast("bf16")(), pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
        F.binary_cross_entropy(x, x)


@pytest.mark.parametrize("implementation", ["foreach", "fused"])
def test_loss_scaling_takes_a_few_numbers(implementation: str) -> None:
    setup = TrainingSetup(batch_size=8, loss="mse", implementation=implementation)
    sizes = {}
    for dtype in ("bf16", "fp16"):
        net = on_meta(lambda: nn.Linear(64, 64))
        trace = trace_training(net, lambda n: (numbers(n, 64),), TrainingSetup(**{**setup.__dict__, "autocast": dtype}))
        sizes[dtype] = peak_bytes(trace)
    assert 0 < sizes["fp16"] - sizes["bf16"] < 100
    assert isinstance(MetaScaler(), torch.amp.GradScaler)


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
