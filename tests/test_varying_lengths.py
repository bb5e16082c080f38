"""Runs with batches of varying length: the interpolated steps against traces of every batch."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vramcast.dataset_builder.devices import load_profile
from vramcast.dataset_builder.schema import LayerTable
from vramcast.dataset_builder.simulation.simulation import OrderPeaks
from vramcast.models.buckets import Buckets
from vramcast.models.calibration import CalibratedErrors
from vramcast.models.example import Example
from vramcast.models.examples import example_of_table
from vramcast.models.outlook import ScoredOutlook
from vramcast.virtual_gpu.allocator import CachingAllocator
from vramcast.virtual_gpu.length_orders import TRACED_STEPS, traced_lengths
from vramcast.virtual_gpu.measurement import Measurement, Status
from vramcast.virtual_gpu.replay import EMPTY_CACHE, replay
from vramcast.virtual_gpu.session import trace_lengths
from vramcast.virtual_gpu.simulate import lower
from vramcast.virtual_gpu.sizes import MIB
from vramcast.virtual_gpu.training_setup import TrainingSetup
from vramcast.virtual_gpu.varying_lengths import StepsDifferError, VaryingRun

TOKENS, WIDTH = 5_000, 256


class Decoder(nn.Module):
    """A small language model; `eager` attention holds all scores, which grow with the square of the length."""

    def __init__(self, eager: bool = False) -> None:
        super().__init__()
        self.eager = eager
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.projections = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.projections:
            query, key, value = layer(x).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
            scores = query @ key.transpose(-1, -2)
            mixed = scores.softmax(-1) @ value if self.eager else F.relu(query) + key + value
            x = x + mixed.transpose(1, 2).flatten(2)
        return self.head(x)


def run_of(network: nn.Module, setup: TrainingSetup, lengths: list[int]) -> tuple[VaryingRun, list[int]]:
    steps = traced_lengths(lengths)
    trace, starts = trace_lengths(network, batch, setup, steps)
    return VaryingRun(trace, load_profile("a100_40gb"), starts, steps), list(steps)


def batch(length: int) -> tuple[Tensor]:
    return (torch.empty(2, length, dtype=torch.long, device="meta"),)


def drawn(count: int, longest: int) -> list[int]:
    generator = random.Random(7)
    return [generator.randint(65, longest) | 1 for _ in range(count)]


def on_meta(eager: bool) -> Decoder:
    with torch.device("meta"):
        return Decoder(eager)


def traced_bytes(network: nn.Module, setup: TrainingSetup, lengths: list[int]) -> int:
    """Return the reserved peak of a run that is traced batch by batch."""
    trace, starts = trace_lengths(network, batch, setup, lengths)
    trace.events.insert(starts[2][0], EMPTY_CACHE)  # a run begins with an empty cache
    allocator = CachingAllocator()
    return replay(lower(trace, load_profile("a100_40gb")).events, allocator).peak_reserved_bytes


@pytest.mark.parametrize("eager", [False, True])
def test_an_order_takes_what_a_trace_of_every_batch_takes(eager):
    setup = TrainingSetup(batch_size=2, optimizer="AdamW", loss="cross_entropy")
    order = drawn(30, 767)
    run, lead_in = run_of(on_meta(eager), setup, order)
    whole = traced_bytes(on_meta(eager), setup, [*lead_in[:2], *order])
    # kernels of shorter batches differ: sums are split and embeddings sorted from some length on
    assert run.reserved_bytes(order) == pytest.approx(whole, rel=0.03)


def test_varying_lengths_reserve_more_than_the_longest_alone_and_by_their_order():
    setup = TrainingSetup(batch_size=2, optimizer="AdamW", loss="cross_entropy")
    lengths = drawn(60, 2047)
    run, _ = run_of(on_meta(False), setup, lengths)
    longest = run.reserved_bytes([max(lengths)] * 5)
    orders = [random.Random(seed).sample(lengths, len(lengths)) for seed in range(6)]
    peaks = [run.reserved_bytes(order) for order in orders]
    assert min(peaks) > 0.95 * longest
    assert sorted(peaks)[3] > 1.1 * longest
    assert max(peaks) > 1.4 * min(peaks)


def test_steps_of_many_batches_repeat_those_between_the_second_and_the_last():
    setup = TrainingSetup(batch_size=2, optimizer="SGD", loss="cross_entropy", accumulate=4)
    run, lead_in = run_of(on_meta(False), setup, [100, 900])
    six = TrainingSetup(batch_size=2, optimizer="SGD", loss="cross_entropy", accumulate=6)
    steps = [901, 333, 777]
    whole = traced_bytes(on_meta(False), six, [*lead_in[:2], *steps])
    order = [length for length in steps for _ in range(6)]
    # sums over rows are split from some length on: their temporaries are interpolated
    assert run.reserved_bytes(order, 6) == pytest.approx(whole, rel=0.015)


def test_the_order_runs_out_of_memory_where_the_device_is_too_small():
    setup = TrainingSetup(batch_size=2, optimizer="AdamW", loss="cross_entropy")
    run, _ = run_of(on_meta(False), setup, [100, 900])
    assert run.reserved_bytes([900]) is not None
    assert run.reserved_bytes([1_000_000]) is None


def test_steps_that_depend_on_the_length_are_refused():
    class Odd(Decoder):
        def forward(self, ids: Tensor) -> Tensor:
            out = super().forward(ids)
            return out * 2 if ids.shape[1] > 850 else out

    with torch.device("meta"):
        network = Odd()
    with pytest.raises(StepsDifferError, match="other allocations"):
        run_of(network, TrainingSetup(batch_size=2, optimizer="SGD", loss="cross_entropy"), [100, 900])


@pytest.mark.parametrize("lengths", [[1], [7, 8, 9], [2048], [91, 2048], [64, 64]])
def test_the_traced_lengths_are_distinct_and_no_multiple_of_eight(lengths):
    steps = traced_lengths(lengths)
    assert len(steps) == TRACED_STEPS
    assert len(set(steps[2:])) == 3
    assert all(length % 8 for length in steps[2:])


def outlook_of(orders: OrderPeaks, capacity_mib: int = 1000) -> ScoredOutlook:
    """Return the outlook of a job whose orders reserve so much, with errors of up to 10 % of its memory."""
    example = example_made(capacity_mib, orders)
    rows = CalibratedErrors({"all": np.linspace(-1, 1, 199)})
    return rows.outlook([example], np.array([float(example.simulation.reserved_bytes)]), 0.01, np.zeros(1))


def example_made(capacity_mib: int, orders: OrderPeaks) -> Example:
    table, training = LayerTable((), (), 1), TrainingSetup(batch_size=2)
    measurement = Measurement(status=Status.OK, reserved_bytes=500 * MIB, breakdown={"context": 0})
    made = example_of_table(table, training, load_profile("a100_40gb"), measurement)
    return replace(made, capacity_bytes=capacity_mib * MIB, orders=orders)


def test_a_bound_covers_the_orders_and_the_errors_of_the_simulation():
    fixed = outlook_of(OrderPeaks((500 * MIB,), longest_bytes=300 * MIB)).quantile_bytes(0.99)[0]
    varied = outlook_of(OrderPeaks((400 * MIB, 500 * MIB, 800 * MIB), longest_bytes=300 * MIB)).quantile_bytes(0.99)[0]
    assert varied - fixed == pytest.approx(300 * MIB, rel=0.05)


def test_a_cache_that_does_not_fit_is_freed_if_the_longest_batch_fits():
    buckets = Buckets(1000 * MIB, 1000 * MIB)
    orders = (500 * MIB, 990 * MIB, 995 * MIB)
    fits = outlook_of(OrderPeaks(orders, longest_bytes=300 * MIB))
    assert fits.proba(buckets)[0, -1] < 0.005  # what is rarer than the rows
    assert fits.quantile_bytes(0.99)[0] < 1000 * MIB
    tight = outlook_of(OrderPeaks(orders, longest_bytes=980 * MIB))
    assert tight.proba(buckets)[0, -1] > 0.1
    runs_out = outlook_of(OrderPeaks((500 * MIB, None, None), longest_bytes=300 * MIB))
    assert runs_out.proba(buckets)[0, -1] == pytest.approx(2 / 3, abs=0.01)
