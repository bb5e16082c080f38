"""Inputs of random shape: the largest of several batches is traced, a repeat gives the same, and a note says so."""

import random

import pytest
import torch
from torch import nn

from vramcast.device.profiles import load_profile
from vramcast.jobs.batches import Batches
from vramcast.jobs.job import ModuleJob
from vramcast.jobs.sampled_batches import SampledBatch, seeded
from vramcast.jobs.sampled_batches import largest_batch as largest
from vramcast.simulation.simulator import Simulator


def largest_batch(draw) -> SampledBatch:
    return largest(lambda seed: seeded(draw, seed))


def length_by_random():
    return torch.zeros(2, random.randint(1, 4000))


def length_by_torch():
    return torch.zeros(2, int(torch.randint(1, 4000, ())))


def length_by_numpy():
    numpy = pytest.importorskip("numpy")
    return {"x": torch.zeros(2, int(numpy.random.randint(1, 4000)))}


@pytest.mark.parametrize("draw", [length_by_random, length_by_torch, length_by_numpy])
def test_the_largest_of_sixteen_batches_is_taken_and_repeats_are_equal(draw):
    first, second = largest_batch(draw), largest_batch(draw)
    assert first.note == second.note
    size = max(
        int(text)
        for text in first.note.replace(";", " ").replace(")", " ").replace("2x", " ").split()
        if text.isdigit()
    )
    assert size > 3000
    assert first.note.startswith(
        "the shapes of inputs vary: of 16 batches, drawn with seeds from 0, the largest was traced (2x"
    )


def test_batches_of_one_shape_are_drawn_four_times_and_get_no_note():
    draws = []
    assert largest_batch(lambda: draws.append(1) or torch.zeros(2, 3)).note is None
    assert len(draws) == 4


def test_an_iterator_that_ends_is_enough():
    batches = iter([torch.zeros(2, 3), torch.zeros(2, 5)])
    sampled = largest_batch(lambda: next(batches))
    assert tuple(sampled.batch.shape) == (2, 5)


def test_an_error_of_the_first_batch_is_raised():
    with pytest.raises(ZeroDivisionError):
        largest_batch(lambda: 1 / 0)


def test_the_callers_random_numbers_are_not_touched():
    random.seed(7)
    torch.manual_seed(7)
    expected = random.Random(7).random(), torch.rand(1, generator=torch.Generator().manual_seed(7))
    largest_batch(length_by_random)
    largest_batch(length_by_torch)
    assert (random.random(), torch.rand(1)) == expected


def test_a_job_with_random_lengths_gets_one_peak_and_a_note():
    def simulated():
        with torch.device("meta"):
            network = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        job = ModuleJob(network, lambda size: torch.zeros(size, random.randint(10, 3000), dtype=torch.long))
        return Simulator(job).simulate({"batch_size": 8}, [load_profile("a100_40gb")])

    first, second = simulated(), simulated()
    peaks = first.peaks["a100_40gb"].bounded
    assert peaks == second.peaks["a100_40gb"].bounded
    assert first.inputs == second.inputs
    assert any("the largest was traced (8x" in note for note in peaks.notes)


def test_a_batch_with_values_has_the_shape_that_was_sampled():
    def make(size):
        batch = torch.ones(size, random.randint(10, 3000))
        return batch if batch.sum() > 0 else None  # cannot be drawn on meta

    batches = Batches(make)
    assert batches.with_values(4).shape == batches(4, "fp32").shape
    assert batches.with_values(4).device.type == "cpu"
    assert "the shapes of inputs vary" in batches.notes(4)[0]
