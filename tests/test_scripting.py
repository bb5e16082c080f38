"""TorchScript and NVTX on the virtual GPU: what eager code takes, scripted and traced code takes."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from vramcast.device.profiles import load_profile
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.cuda.emulation import CudaEmulation

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


@pytest.fixture
def gpu():
    with CudaEmulation(load_profile("a100_40gb"), options=AllocatorOptions()) as virtual:
        yield virtual


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.relu(x) * factor + torch.zeros_like(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1024, 512)

    def forward(self, x):
        return torch.relu(self.layer(x))


def test_a_scripted_function_takes_what_the_function_takes(gpu):
    scripted = torch.jit.script(scaled)
    assert scripted(torch.tensor([-1.0, 2.0], device="cuda"), 3.0).is_cuda
    x = torch.ones(256, 1024, device="cuda")
    taken = []
    for function in (scaled, scripted):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function(x, 2.0)
        taken.append(torch.cuda.max_memory_allocated() - before)
    assert taken[0] == taken[1] == 3 * 256 * 1024 * 4  # relu and zeros beside a product, or product and zeros and sum


def test_a_scripted_network_moves_and_trains(gpu):
    scripted = torch.jit.script(Net())
    scripted.cuda()
    assert [item.device.type for item in scripted.parameters()] == ["cuda", "cuda"]
    before = torch.cuda.memory_allocated()
    assert before == 1024 * 512 * 4 + 512 * 4
    scripted(torch.ones(64, 1024, device="cuda")).sum().backward()
    assert [tuple(item.grad.shape) for item in scripted.parameters()] == [(512, 1024), (512,)]


def test_a_network_is_traced_on_the_device(gpu):
    network, x = Net().cuda(), torch.ones(64, 1024, device="cuda")
    traced = torch.jit.trace(network, x, check_trace=False)
    out = traced(x)
    assert out.is_cuda and tuple(out.shape) == (64, 512)


def test_torch_is_scripted_as_before_afterwards():
    before = torch.jit._builtins._find_builtin, torch.jit._recursive.try_compile_fn, torch.cuda.nvtx._nvtx
    with CudaEmulation(load_profile("a100_40gb"), options=AllocatorOptions()):
        assert torch.cuda.nvtx._nvtx is not before[2]
    assert (torch.jit._builtins._find_builtin, torch.jit._recursive.try_compile_fn, torch.cuda.nvtx._nvtx) == before
    assert torch.jit.script(scaled)(torch.tensor([-1.0, 2.0]), 3.0).tolist() == [0.0, 6.0]


def test_ranges_of_nvtx_have_depths_and_handles(gpu):
    nvtx = torch.cuda.nvtx
    assert [nvtx.range_push("step"), nvtx.range_push("forward"), nvtx.range_pop(), nvtx.range_pop()] == [0, 1, 1, 0]
    assert nvtx.range_pop() < 0  # none is open
    with nvtx.range("layer {}", 3):
        assert nvtx.range_push("inside") == 1
        nvtx.range_pop()
    first, second = nvtx.range_start("a"), nvtx.range_start("b")
    assert first != second
    nvtx.range_end(first)
    nvtx.mark("here")
    with torch.autograd.profiler.emit_nvtx():
        assert torch.ones(3, device="cuda").sum().item() == 3


def test_the_functional_optimizers_of_torch_distributed_are_imported_on_the_device():
    """Their import scripts them, once for each process."""
    code = """
from vramcast.device.profiles import load_profile
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.cuda.emulation import CudaEmulation
with CudaEmulation(load_profile("t4"), options=AllocatorOptions()):
    import torch.distributed.optim as optim
    print(optim.ZeroRedundancyOptimizer.__name__)
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "ZeroRedundancyOptimizer"
