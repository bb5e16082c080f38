"""Stand-ins for libraries: found like the library, with the tensors of its functions."""

import importlib.util
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch

from vramcast.device.profiles import load_profile
from vramcast.errors import UserError
from vramcast.virtual_gpu.cuda.emulation import CudaEmulation

A100 = "a100_80gb"


def test_the_stand_in_is_found_inside_of_the_virtual_gpu_alone() -> None:
    with CudaEmulation(load_profile(A100), stand_ins=("flash_attn",)) as gpu:
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
    with CudaEmulation(load_profile(A100), stand_ins=("flash_attn",)):
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
    with pytest.raises(UserError, match="flash_attn"), CudaEmulation(load_profile(A100), stand_ins=("xformers",)):
        pass


KERNEL = """
import torch
import triton
import triton.language as tl
from triton.language.extra.libdevice import tanh


@triton.autotune(configs=[triton.Config({"BLOCK": 32}, num_warps=4)], key=["n"])
@triton.jit
def fill(x, n, BLOCK: tl.constexpr):
    tl.store(x, tanh(tl.zeros((BLOCK,), dtype=tl.float32)))


def filled(n):
    x = torch.empty(triton.next_power_of_2(n), device="cuda")
    fill[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, n)
    return x
"""


@pytest.fixture
def kernels_of_liger(tmp_path, monkeypatch):
    """A package of the name of Liger-Kernel with one Triton kernel, for environments that lack the library."""
    package = tmp_path / "liger_kernel"
    package.mkdir()
    (package / "__init__.py").write_text(KERNEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
        del sys.modules[name]


def test_kernels_of_triton_allocate_nothing_once_liger_is_imported(kernels_of_liger):
    if importlib.util.find_spec("triton") is not None:
        pytest.skip("Triton is installed: no stand-in")
    with CudaEmulation(load_profile(A100)):
        assert importlib.util.find_spec("triton") is None, "other libraries take other paths where Triton is installed"
        from liger_kernel import filled  # type: ignore[import-not-found]

        before = torch.cuda.memory_allocated()
        x = filled(1000)
        assert (x.shape, torch.cuda.memory_allocated() - before) == ((1024,), 4096)
        assert version("triton")
    assert importlib.util.find_spec("triton") is None


def test_kernels_of_an_installed_triton_are_not_launched():
    from types import ModuleType

    from vramcast.virtual_gpu.cuda.libraries.triton_kernels import PATCHES
    from vramcast.virtual_gpu.cuda.patches import Patches

    module, patches = ModuleType("triton.runtime.jit"), Patches()

    class JITFunction:
        def run(self, *args, **kwargs):
            raise RuntimeError("0 active drivers")

    module.JITFunction = JITFunction
    with CudaEmulation(load_profile(A100)) as gpu:
        PATCHES["triton.runtime.jit"](module, patches, gpu)
        assert JITFunction().run(1, grid=(1,), warmup=False) is None
    patches.undo()
    with pytest.raises(RuntimeError, match="drivers"):
        JITFunction().run()
