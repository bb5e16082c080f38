"""Several devices in one process, and meshes of several dimensions: `vramcast run --devices`, torchrun."""

import sys

import pytest
import torch
from script_runs import run

from vramcast.commands.run.run_command import _devices
from vramcast.device.profiles import load_profile
from vramcast.errors import UserError
from vramcast.simulation.scripts.client import RunOptions, run_script
from vramcast.simulation.scripts.command_line import parse_command
from vramcast.virtual_gpu.cuda.emulation import CudaEmulation

MIB = 2**20
WORKSPACE = 8_519_680
"""Of cuBLAS, in the forward and in the backward thread."""


def linear(inputs, outputs):
    return inputs * outputs + outputs


def test_naive_model_parallelism_has_a_peak_for_each_device(tmp_path):
    report = run("two_devices.py", tmp_path=tmp_path, devices=2)
    first, second = 2 * linear(1024, 1024), linear(1024, 4096) + linear(4096, 10)
    assert [item.rank for item in report.devices] == [0, 1]
    for item, parameters in zip(report.devices, (first, second), strict=True):
        states = 16 * parameters + 2 * WORKSPACE  # weights, gradients, two averages
        temporaries = 4 * parameters  # the denominators of the step
        assert item.allocated_bytes == pytest.approx(states + temporaries, rel=0.05)
    by_phase = {item.phase: item.allocated_bytes for item in report.phases}
    assert by_phase["loading"] == pytest.approx(4 * second, rel=0.001), "the larger one is reported, without the input"
    assert "cuda:1, the device that takes most of 2" in report.assumptions[0]


def test_data_parallel_makes_replicas_on_the_other_devices(tmp_path):
    report = run("data_parallel.py", tmp_path=tmp_path, devices=2)
    weights, half = 8 * linear(1024, 1024), 4 * 256 * 1024
    first, second = (item.allocated_bytes for item in report.devices)
    # replica and two hidden layers forward; backward, the gradients of the replica and of a hidden layer
    assert weights + 2 * WORKSPACE < second < 2 * weights + 2 * WORKSPACE + 6 * half
    assert first > second + 2 * half, "the whole input and output are on the first"
    assert not any("runs on one device" in item for item in report.assumptions)


def emulated(observed, count=2):
    return CudaEmulation(load_profile("a100_40gb"), device_count=count, observed=observed)


@pytest.mark.parametrize("observed", [0, 1])
def test_tensors_know_their_device(observed):
    with emulated(observed) as gpu:
        one, two = torch.ones(8, device="cuda", requires_grad=True), torch.zeros(1024, 1024, device="cuda:1")
        moved = one.to("cuda:1")
        assert (one.get_device(), moved.get_device(), (moved * 2).device.index) == (0, 1, 1)
        assert moved.to("cuda:1") is moved and one.cpu().device.type == "cpu"
        (moved * 3).sum().backward()
        assert one.grad.device == torch.device("cuda:0")
        with torch.cuda.device(1):
            assert torch.empty(3, device="cuda").device.index == torch.cuda.current_device() == 1
        torch.cuda.set_device(1)
        assert torch.tensor([1.0], device="cuda").get_device() == torch.ones(2).cuda().get_device() == 1
        torch.cuda.set_device(0)
        assert torch.zeros_like(two).device.index == two.untyped_storage().device.index == 1
        with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cuda:1"):
            one + moved
        with pytest.raises(RuntimeError, match="invalid device ordinal: found cuda:2 among 2"):
            torch.ones(3, device="cuda:2")
        expected = {0: 0, 1: 4 * MIB}[observed]
        assert expected <= gpu.memory.allocator.allocated_bytes < expected + 16 * 512, "the other device counts nothing"


def test_the_number_of_devices_is_what_is_visible(monkeypatch):
    for visible, named, count in (("", None, 1), ("0,1", None, 2), ("3", 4, 1), ("", 4, 4), ("-1", None, 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert _devices(named) == count
    with pytest.raises(UserError, match="--devices"):
        _devices(0)
    command = parse_command(["torchrun", "--nproc_per_node", "2", "train.py"])
    with pytest.raises(UserError, match="each process of a launcher has a device of its own"):
        run_script(command, load_profile("a100_40gb"), [], RunOptions(devices=2))


def launched(script, ranks, tmp_path):
    """Return the report of the first rank under torchrun."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
    return run(script, command=words, tmp_path=tmp_path, rank=0)


def optimizer_state(report):
    return report.simulation.peaks["a100_40gb"].bounded.breakdown["optimizer_state"]


def test_a_mesh_of_three_dimensions_shards_by_two_of_them(tmp_path):
    report = launched("mesh_3d.py", 8, tmp_path)
    split = 2 * 1024 * 4096 + 4096  # weights, and the bias that is split by columns
    own = split // 2 // 2 + 1024 // 2  # by tensors and by shards; the other bias by shards alone
    assert optimizer_state(report) == pytest.approx(8 * own, rel=0.001) and report.world_size == 8


def test_experts_on_other_ranks_get_their_tokens(tmp_path):
    report = launched("expert_parallel.py", 4, tmp_path)
    own = linear(512, 4) + linear(512, 2048) + linear(2048, 512)
    assert optimizer_state(report) == pytest.approx(12 * own, rel=0.01), (
        "two averages, and the denominators of the step"
    )


def test_context_parallelism_halves_a_sequence(tmp_path):
    both = [launched("context_parallel.py", ranks, tmp_path) for ranks in (2, 4)]
    forward = [next(item.allocated_bytes for item in report.phases if item.phase == "forward") for report in both]
    fewer = 2 * 1024 // 2 - 2 * 1024 // 4  # tokens of a rank
    projected = 2 * fewer * (256 + 768)  # the input and its projection, in bf16
    attention = 2 * 4 * fewer * 256 * 2  # sums in fp32 and the parts that go round, at most
    assert projected < forward[0] - forward[1] < projected + attention
    assert all(optimizer_state(report) == pytest.approx(2 * 2 * linear(256, 768), rel=0.01) for report in both)
