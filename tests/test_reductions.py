"""Sums over rows, as torch's reduction kernel splits them among blocks, and the buffer in which those meet.

The expected figures are setReduceConfig of aten/src/ATen/native/cuda/Reduce.cuh, worked out by hand.
"""

from typing import Any

import pytest
import torch
from torch import nn

from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.operators.cuda_paths import cuda_paths
from vramcast.virtual_gpu.operators.kernels import cuda_kernels
from vramcast.virtual_gpu.operators.reductions import reduction_call, split_bytes
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.replay.replay import FREE
from vramcast.virtual_gpu.replay.simulate import lower
from vramcast.virtual_gpu.tracing.trace import ReductionCall, Tracer

A100 = {"multiprocessors": 108, "capability": 8.0}


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def buffer_bytes(x: torch.Tensor, *dims: int, **device: Any) -> int:
    call = reduction_call(x, dims)
    return split_bytes(call, **{**A100, **device}) if call else 0


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        # four columns a thread, blocks of 32 x 4 threads: 1,024 values a thread, so 64 splits, of 128 places an output
        ((4096, 1024), 4 * 1024 * 64 * 128),
        ((8192, 512), 4 * 512 * 128 * 128),
        # 1,728 blocks fill the card, whatever the columns are
        ((32768, 768), 108 * MIB),
        ((131072, 2048), 128 * MIB),  # but no thread adds more than 256 values: 128 splits for 108
        # below 256 values a thread nothing is split
        ((1020, 1024), 0),
        ((1024, 1024), 4 * 1024 * 16 * 128),
        # two columns a thread or one: larger blocks, smaller buffers
        ((4096, 1022), 4 * 1022 * 32 * 64),
        ((4096, 1021), 4 * 1021 * 14 * 32),
    ],
)
def test_a_sum_over_rows(shape: tuple[int, int], size: int) -> None:
    assert buffer_bytes(rows(*shape), 0) == size


def test_leading_dimensions_are_one() -> None:
    assert buffer_bytes(rows(8, 512, 1024), 0, 1) == buffer_bytes(rows(4096, 1024), 0)


def test_sums_along_a_row_need_one_place_an_output() -> None:
    # blocks of 32 x 16 threads, one to a row; 432 would fill the card, so 27 splits
    assert buffer_bytes(rows(16, 32 * 16 * 1024), 1) == 4 * 16 * 27


def test_the_mean_over_long_sequences_is_split() -> None:
    assert buffer_bytes(rows(8, 1024, 2048), 1) == 4 * 8 * 2048 * 14 * 128
    assert buffer_bytes(rows(8, 512, 2048), 1) == 0


def test_half_precision_meets_in_single() -> None:
    assert buffer_bytes(rows(4096, 1024, dtype=torch.bfloat16), 0) == buffer_bytes(rows(4096, 1024), 0)
    assert buffer_bytes(rows(4096, 1024, dtype=torch.float64), 0) == 2 * buffer_bytes(rows(4096, 1024), 0)


def test_nothing_to_split() -> None:
    assert reduction_call(rows(4096, 1), (1,)) is None
    assert reduction_call(rows(1, 4096), (0,)) is None
    assert reduction_call(rows(0, 16), (0,)) is None


@pytest.mark.parametrize(
    ("multiprocessors", "capability", "blocks"), [(132, 9.0, 16), (80, 7.0, 16), (82, 8.6, 12), (40, 7.5, 8)]
)
def test_the_device_says_how_many_blocks_fill_it(multiprocessors: int, capability: float, blocks: int) -> None:
    wanted = multiprocessors * blocks
    size = buffer_bytes(rows(262144, 128), 0, multiprocessors=multiprocessors, capability=capability)
    assert size == 4 * 128 * wanted * 128


def test_more_outputs_than_the_device_has_room_for() -> None:
    call = ReductionCall(blocks=1729, threads=128, values=4096, bytes_a_split=512)
    assert split_bytes(call, **A100) == 0
    assert split_bytes(ReductionCall(1728, 128, 4096, 512), **A100) == 16 * 512  # so that none adds more than 256


def test_the_gradient_of_a_bias_takes_the_buffer_for_the_time_of_the_sum() -> None:
    with torch.device("meta"):
        net, x = nn.Linear(64, 1024), torch.randn(4096, 64)
    tracer = Tracer(cuda_kernels())
    with cuda_paths(), tracer:
        net(x).pow(2).sum().backward()
    profile = DeviceProfile(name="a", title="A", total_mib=40960, compute_capability=8.0, context_mib=0)
    events = lower(tracer.trace, profile).events
    size = 4 * 1024 * 64 * 128
    (at,) = (index for index, event in enumerate(events) if event[1] == size)
    assert events[at - 1][1] == 4 * 1024  # the sum itself
    assert events[at + 1] == (events[at][0], FREE)
