"""Autocast on meta against what torch documents, what its headers say, and what it does on the CPU."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from meta_traces import BFLOAT, HALF, SINGLE, numbers, on_meta, operators, peak_bytes, told, transformer
from torch import Tensor, nn
from torch.nn import functional as F

from vramcast.virtual_gpu.operators import autocast as rules
from vramcast.virtual_gpu.operators.autocast import MetaScaler, autocast
from vramcast.virtual_gpu.tracing.session import trace_training
from vramcast.virtual_gpu.training.setup import TrainingSetup

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
