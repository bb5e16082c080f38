"""Runs with batches of varying length: the interpolated steps against traces of every batch."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vramcast.commands.classify.page import _orders
from vramcast.device.profiles import load_profile
from vramcast.jobs.job import ModuleJob
from vramcast.jobs.spec import LayerTable
from vramcast.models.buckets import Buckets
from vramcast.models.calibration import with_tail
from vramcast.models.distribution import ErrorDistribution, bounds_of
from vramcast.models.estimators.calibrated_simulation import over_orders
from vramcast.models.example import Example
from vramcast.models.examples import example_of_table
from vramcast.models.predictor import Predictor, Question
from vramcast.models.uncertainty import unit_bytes
from vramcast.simulation.result import OrderPeaks, with_orders
from vramcast.simulation.simulator import Simulator
from vramcast.virtual_gpu.allocator.allocator import CachingAllocator
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.measurement import Measurement, Status
from vramcast.virtual_gpu.replay.length_orders import TRACED_STEPS, LengthOrders, traced_lengths
from vramcast.virtual_gpu.replay.replay import EMPTY_CACHE, replay
from vramcast.virtual_gpu.replay.simulate import lower
from vramcast.virtual_gpu.replay.varying_lengths import StepsDifferError, VaryingRun
from vramcast.virtual_gpu.tracing.session import trace_lengths
from vramcast.virtual_gpu.training.setup import TrainingSetup

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


def distribution_of(orders: OrderPeaks, capacity_mib: int = 1000) -> ErrorDistribution:
    """Return the distribution of a job whose orders reserve so much, with errors of up to 10 % of its memory."""
    example = example_made(capacity_mib, orders)
    need, unit = float(example.simulation.reserved_bytes), unit_bytes(example, "all", 0.0)
    scores = with_tail(over_orders(np.linspace(-1, 1, 199), example, need, unit))
    bounds = bounds_of([example])
    estimate = bounds["overhead_bytes"] + need
    return ErrorDistribution(**bounds, estimate_bytes=estimate, unit_bytes=np.array([unit]), scores=[scores])


def example_made(capacity_mib: int, orders: OrderPeaks) -> Example:
    table, training = LayerTable((), (), 1), TrainingSetup(batch_size=2)
    measurement = Measurement(status=Status.OK, reserved_bytes=500 * MIB, breakdown={"context": 0})
    made = example_of_table(table, training, load_profile("a100_40gb"), measurement)
    return replace(made, capacity_bytes=capacity_mib * MIB, orders=orders)


def test_a_bound_covers_the_orders_and_the_errors_of_the_simulation():
    fixed = distribution_of(OrderPeaks((500 * MIB,), longest_bytes=300 * MIB)).quantile_bytes(0.99)[0]
    varied = distribution_of(OrderPeaks((400 * MIB, 500 * MIB, 800 * MIB), longest_bytes=300 * MIB)).quantile_bytes(
        0.99
    )[0]
    assert varied - fixed == pytest.approx(300 * MIB, rel=0.05)


def test_a_cache_that_does_not_fit_is_freed_if_the_longest_batch_fits():
    buckets = Buckets(1000 * MIB, 1000 * MIB)
    orders = (500 * MIB, 990 * MIB, 995 * MIB)
    fits = distribution_of(OrderPeaks(orders, longest_bytes=300 * MIB))
    assert fits.proba(buckets)[0, -1] < 0.005  # what is rarer than the rows
    assert fits.quantile_bytes(0.99)[0] < 1000 * MIB
    tight = distribution_of(OrderPeaks(orders, longest_bytes=980 * MIB))
    assert tight.proba(buckets)[0, -1] > 0.1
    runs_out = distribution_of(OrderPeaks((500 * MIB, None, None), longest_bytes=300 * MIB))
    assert runs_out.proba(buckets)[0, -1] == pytest.approx(2 / 3, abs=0.01)


def test_the_longest_batch_is_in_every_order():
    orders = LengthOrders.of_samples([100] * 20_000 + [2048], 1, count=5)
    assert all(2048 in order and len(order) == 400 for order in orders.orders)
    assert max(orders.traced) == 2047
    grouped = LengthOrders.of_samples(list(range(1, 101)), 10, count=2)
    assert all(len(order) == 10 and max(order) == 100 for order in grouped.orders)


def test_gradients_that_are_dropped_after_a_step_are_freed_there():
    setup = TrainingSetup(batch_size=2, optimizer="AdamW", loss="cross_entropy", zero_grad="after_step")
    run, _ = run_of(on_meta(False), setup, [100, 900])
    assert run.reserved_bytes([900, 100, 500]) is not None


def decoder_job() -> ModuleJob:
    return ModuleJob(on_meta(False), lambda size: torch.zeros(size, 900, dtype=torch.long))


def test_a_simulator_replays_orders_and_says_why_it_cannot():
    simulator, profile = Simulator(decoder_job()), load_profile("a100_40gb")
    options = {"batch_size": 2, "optimizer": "adamw"}
    peaks = simulator.by_order(options, profile, LengthOrders.of_samples([100, 300, 899, 901], 1, count=2))
    assert peaks.reason is None and len(peaks.reserved_bytes) == 2 and peaks.expandable_bytes
    for samples, reason in (([900, 900], "equally long"), ([10, 20], "short")):
        assert reason in simulator.by_order(options, profile, LengthOrders.of_samples(samples, 1)).reason

    class Fixed(Decoder):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids.view(2, 900))

    with torch.device("meta"):
        network = Fixed()
    fixed = Simulator(ModuleJob(network, lambda size: torch.zeros(size, 900, dtype=torch.long)))
    peaks = fixed.by_order(options, profile, LengthOrders.of_samples([100, 900], 1, count=2))
    assert "steps of other lengths cannot be replayed" in peaks.reason


def test_no_order_reserves_less_than_the_longest_batch_alone():
    job, profile = decoder_job(), load_profile("a100_40gb")
    simulation = Simulator(job).simulate({"batch_size": 2, "optimizer": "adamw"}, [profile])
    longest = simulation.peaks[profile.name].bounded
    varied = with_orders(simulation, profile.name, OrderPeaks((1, 2, longest.reserved_bytes + MIB))).peaks[profile.name]
    assert varied.orders.reserved_bytes == (
        longest.reserved_bytes,
        longest.reserved_bytes,
        longest.reserved_bytes + MIB,
    )
    assert varied.bounded.breakdown == longest.breakdown


def test_the_need_of_orders_that_run_out_is_a_number():
    job, profile = decoder_job(), load_profile("rtx_3060")
    simulation = Simulator(job).simulate({"batch_size": 2, "optimizer": "adamw"}, [profile])
    peak = simulation.peaks[profile.name].bounded.reserved_bytes
    varied = with_orders(simulation, profile.name, OrderPeaks((peak, None, None)))
    answer = Predictor.load("universal").answers([Question.of_simulation("made", varied, profile)])[0]
    assert answer.verdict == "does not fit"
    assert answer.capacity_mib < answer.safe_mib < 10 * answer.capacity_mib


def test_the_page_says_what_orders_reserve_and_what_runs_out():
    figures = {"orders": 9, "orders_out_of_memory": 2, "longest_reserved_mib": 900.0, "least_reserved_mib": 950.0,
               "most_reserved_mib": 990.0, "expandable_reserved_mib": 940.0}  # fmt: skip
    text = _orders(figures)
    assert "950 MiB to 990 MiB, and 2 of them run out of memory" in text and "would reserve 940 MiB" in text
    assert "expandable" not in _orders({**figures, "expandable_reserved_mib": 960.0})
    alone = _orders({"orders": 9, "orders_out_of_memory": 9, "longest_reserved_mib": 900.0})
    assert "9 of them run out of memory; for the longest alone it is 900 MiB" in alone
