"""Traces between two batch sizes: computed where a third trace proves them, and then equal to traces that were made."""

import pytest

from vramcast.device.profiles import load_profile
from vramcast.jobs.families import make_spec
from vramcast.jobs.job import SpecJob
from vramcast.jobs.spec import Spec
from vramcast.simulation.batch_sweep import BatchSweep
from vramcast.simulation.simulator import Simulator
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.replay.replay import FREE
from vramcast.virtual_gpu.tracing.batch_sizes import AffineTraces, traces_by_size
from vramcast.virtual_gpu.tracing.trace import LibraryCall, SumCall, Trace
from vramcast.virtual_gpu.training.setup import TrainingSetup

SIZES = [2, 3, 4, 7, 8, 12, 16]
CNN = {"arch": "residual", "input_channels": 3, "input_size": 16, "num_classes": 5, "depth": 4, "base_filters": 8}


def line(size: int) -> Trace:
    return Trace([(0, 100), (1, 64 * size), (0, FREE)], [0, 3], ["", ""])


def kinked(size: int) -> Trace:
    return Trace([(0, 64 * max(size, 8))], [3], [""])


def test_three_traces_prove_a_line() -> None:
    traces = {size: (trace, made) for size, trace, made in traces_by_size(line, SIZES)}
    assert sorted(traces) == SIZES
    assert sum(made for _, made in traces.values()) == 3
    assert all(trace == line(size) for size, (trace, _) in traces.items())


def test_a_kink_is_found_and_each_side_is_a_line_of_its_own() -> None:
    sizes = list(range(1, 33))
    traces = {size: (trace, made) for size, trace, made in traces_by_size(kinked, sizes)}
    assert all(trace == kinked(size) for size, (trace, _) in traces.items())
    assert 3 < sum(made for _, made in traces.values()) < 16


@pytest.mark.parametrize("sizes", [[5], [3, 9], [1, 2, 3]])
def test_few_sizes_are_all_traced(sizes: list[int]) -> None:
    assert sorted((size, made) for size, _, made in traces_by_size(line, sizes)) == [(size, True) for size in sizes]


def test_traces_with_other_events_have_no_line() -> None:
    longer = Trace([*line(4).events, (1, FREE)], [0, 3], ["", ""])
    assert AffineTraces.through((2, line(2)), (4, longer)) is None
    freed_later = Trace([(0, 100), (1, 256), (1, FREE)], [0, 3], ["", ""])
    assert AffineTraces.through((2, line(2)), (4, freed_later)) is None


def test_sizes_that_are_no_whole_numbers_are_not_computed() -> None:
    odd = AffineTraces.through((2, Trace([(0, 10)], [3], [""])), (4, Trace([(0, 15)], [3], [""])))
    assert odd is not None
    assert odd.at(3) is None


def test_calls_are_computed_with_the_sizes() -> None:
    def with_calls(size: int) -> Trace:
        calls = [LibraryCall("cublas"), SumCall((size, 6), (6, 1), (0,), 4)]
        return Trace([(0, -2), (1, -3)], [5, 5], ["", ""], calls)  # type: ignore[arg-type]

    found = AffineTraces.through((2, with_calls(2)), (8, with_calls(8)))
    assert found is not None
    assert found.at(5) == with_calls(5)


SPECS = {
    "cnn": make_spec("cnn", CNN, TrainingSetup(batch_size=16)),
    "bias sums, accumulation, odd last": make_spec(
        "cnn", {**CNN, "arch": "uniform"}, TrainingSetup(batch_size=16, accumulate=3, last_batch_size=1)
    ),
    "recurrent": Spec(
        "recurrent",
        {"cell": "LSTM", "embedding": 8, "hidden": 16, "layers": 1, "classes": 4, "vocabulary": 50, "sequence": 9},
        TrainingSetup(batch_size=16, optimizer="SGD"),
    ),
    "sorted tokens": Spec(
        "recurrent",
        {"cell": "GRU", "embedding": 8, "hidden": 8, "layers": 1, "classes": 4, "vocabulary": 50, "sequence": 1637},
        TrainingSetup(batch_size=16, optimizer="SGD"),
    ),
}


@pytest.mark.parametrize("name", SPECS)
def test_a_sweep_has_the_peaks_of_simulations_one_by_one(name: str) -> None:
    profiles = [load_profile(device) for device in ("a100_40gb", "rtx_4090", "t4")]
    sweep = BatchSweep(SPECS[name], 8.0, AllocatorOptions())
    swept = list(sweep.sizes(SIZES))
    assert sorted(item.spec.training.batch_size for item in swept) == SIZES
    for item in swept:
        alone = Simulator(SpecJob(item.spec)).simulate({}, profiles)
        peaks = sweep.peaks(item.trace, profiles)
        assert {"a100_40gb", "rtx_4090"} <= peaks.keys()
        assert {device: (found.bounded, found.unbounded) for device, found in peaks.items()} == {
            device: (alone.peaks[device].bounded, alone.peaks[device].unbounded) for device in peaks
        }
    assert name == "recurrent" or not all(item.traced for item in swept)
