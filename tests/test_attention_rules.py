"""Which attention a card runs, and what that takes."""

from typing import Any

import pytest
import torch
from meta_traces import BFLOAT, HALF, SINGLE, Recorder, numbers, operators, told
from torch import Tensor
from torch.nn import functional as F

from vramcast.virtual_gpu.operators.attention import efficient_workspace_bytes
from vramcast.virtual_gpu.operators.cuda_paths import cuda_paths
from vramcast.virtual_gpu.tracing.trace import AttentionCall


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
    assert attention_kernel(single, 8.0, enable_gqa=True) == "efficient"  # as many heads of keys as of queries
    assert attention_kernel(half, 7.5, enable_gqa=True) == "efficient"
    assert attention_kernel(half, 8.0, attn_mask=mask, enable_gqa=True) == "efficient"
    assert attention_kernel(numbers(4, 16, 64, dtype=HALF), 8.0) == "math"  # without a batch


def test_groups_of_one_head_allocate_what_attention_without_groups_does() -> None:
    q, k, v = (numbers(2, 4, 100, 64, grad=True) for _ in range(3))
    # output and row sums alone, rows rounded to 32 (cuda/attention.cu, kAlignLSE): the math kernel would add scores
    story = told(lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True).sum().backward(), q, k, v)
    assert story[:2] == [2 * 4 * 100 * 64 * 4, 2 * 4 * 128 * 4]
    assert 2 * 4 * 100 * 100 * 4 not in story
    assert story == told(lambda: F.scaled_dot_product_attention(q, k, v).sum().backward(), q, k, v)


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
    call = AttentionCall((2, 3, 100, size), 100, size, is_half=dtype is HALF)
    assert efficient_workspace_bytes(call, capability) == 2 * 3 * expected


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
