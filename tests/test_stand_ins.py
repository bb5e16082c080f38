"""The stand-in for flash-attn: found like the library, with its tensors in both passes."""

import importlib.util
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch

from vramcast.dataset_builder.devices import load_profile
from vramcast.errors import UserError
from vramcast.virtual_gpu.cuda.virtual_cuda import VirtualCuda

A100 = "a100_80gb"


def test_the_stand_in_is_found_inside_of_the_virtual_gpu_alone() -> None:
    with VirtualCuda(load_profile(A100), stand_ins=("flash_attn",)) as gpu:
        assert importlib.util.find_spec("flash_attn") is not None
        assert version("flash_attn") == "2.6.3"
        from flash_attn.bert_padding import pad_input, unpad_input  # type: ignore[import-not-found]

        mask = torch.tensor([[1, 1, 0], [1, 0, 0]], device="cuda")
        rows, places, limits, longest, _ = unpad_input(torch.zeros(2, 3, 4, device="cuda"), mask)
        assert (rows.shape, limits.tolist(), longest) == ((3, 4), [0, 2, 3], 2)
        assert pad_input(rows, places, 2, 3).shape == (2, 3, 4)
        assert any("flash_attn" in str(item) for item in gpu.assumptions.all())
    assert importlib.util.find_spec("flash_attn") is None
    with pytest.raises(PackageNotFoundError):
        version("flash_attn")


def test_the_stand_in_allocates_what_flash_attention_does() -> None:
    with VirtualCuda(load_profile(A100), stand_ins=("flash_attn",)):
        from flash_attn import flash_attn_func  # type: ignore[import-not-found]

        def tensor(heads: int) -> torch.Tensor:
            return torch.empty(2, 1024, heads, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)

        q, k, v = tensor(8), tensor(2), tensor(2)
        before = torch.cuda.memory_allocated()
        out = flash_attn_func(q, k, v, causal=True)
        bytes_of_q, sums = q.numel() * 2, 2 * 8 * 1024 * 4
        assert torch.cuda.memory_allocated() - before == bytes_of_q + sums + 512
        gradient = torch.empty_like(out)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out.backward(gradient)
        # gradients of queries, keys and values; row sums and queries in single precision; keys and values of each head
        peak = (bytes_of_q + bytes_of_q // 2) + sums + 2 * bytes_of_q + 2 * bytes_of_q
        assert torch.cuda.max_memory_allocated() - before == peak
        assert q.grad is not None and k.grad is not None and k.grad.shape == k.shape


def test_an_unknown_stand_in_is_refused() -> None:
    with pytest.raises(UserError, match="flash_attn"), VirtualCuda(load_profile(A100), stand_ins=("xformers",)):
        pass
