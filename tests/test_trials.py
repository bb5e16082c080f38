"""Trials of cudnn.benchmark: the workspace of the Fourier transform, and the memory during a trial."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from vramcast.dataset_builder.backends.virtual import trace_spec
from vramcast.device.profiles import load_device
from vramcast.jobs.families import make_spec
from vramcast.jobs.job import ModuleJob, SpecJob
from vramcast.models import load
from vramcast.models.predictor import Question
from vramcast.simulation.simulator import Simulator
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.profile import parse_profile
from vramcast.virtual_gpu.replay.simulate import measurement_of, replay_on, simulate
from vramcast.virtual_gpu.replay.trials import largest_workspace_bytes, transform_bytes, trials_of
from vramcast.virtual_gpu.tracing.trace import ConvolutionCall
from vramcast.virtual_gpu.training.setup import TrainingSetup

A100 = parse_profile(load_device("a100_40gb_timm_2024"))


def call(batch: int, inputs: int, outputs: int, sides: tuple[int, int], kernel: int = 1) -> ConvolutionCall:
    shapes = ((batch, inputs, *sides), (outputs, inputs, kernel, kernel), (batch, outputs, *sides))
    return ConvolutionCall("forward", *shapes, (1, 1), 1)


@pytest.mark.parametrize(
    ("tried", "side", "samples"),
    [
        (call(32, 1024, 2048, (7, 7)), 16, 32),
        (call(8, 1536, 1536, (32, 32)), 32, 8),
        (call(8, 64, 64, (32, 32), kernel=3), 64, 8),
        (call(64, 128, 256, (4, 256)), 256, 1),
    ],
)
def test_images_are_padded_to_a_power_of_two(tried: ConvolutionCall, side: int, samples: int) -> None:
    outputs, inputs = tried.weight[:2]
    planes = 2 * inputs * outputs + samples * (inputs + outputs)
    assert transform_bytes(tried) == 8 * side * (side // 2 + 1) * planes


def test_some_calls_have_no_transform() -> None:
    plain = call(8, 64, 64, (56, 56), kernel=3)
    assert transform_bytes(plain)
    assert not transform_bytes(replace(plain, stride=(2, 2)))
    assert not transform_bytes(replace(plain, groups=64, weight=(64, 1, 3, 3)))
    assert not transform_bytes(call(8, 64, 64, (256, 256), kernel=3))
    assert not transform_bytes(replace(plain, x=(8, 1, 64), weight=(1, 1, 3), y=(8, 1, 64), stride=(1,)))


def test_channels_last_has_copies_instead_of_a_transform() -> None:
    plain = replace(call(8, 64, 64, (56, 56), kernel=3), channels_last=True)
    images = 8 * 64 * 56 * 56
    assert largest_workspace_bytes(plain) == 2 * 4 * (2 * images + 64 * 64 * 9)
    depthwise = replace(plain, groups=64, weight=(64, 1, 3, 3), dtype="float16")
    assert largest_workspace_bytes(depthwise) == 4 * 2 * (2 * images + 64 * 9)


def _cnn(cudnn_benchmark: bool) -> TrainingSetup:
    return TrainingSetup(batch_size=4, cudnn_benchmark=cudnn_benchmark)


def test_a_trial_adds_its_workspace_to_the_memory_in_use() -> None:
    network = {
        "arch": "uniform", "input_channels": 3, "input_size": 30, "num_classes": 10, "depth": 3, "base_filters": 512,
    }  # fmt: skip
    spec = make_spec("cnn", network, _cnn(cudnn_benchmark=True))
    trace = trace_spec(spec)
    lowered, replayed = replay_on(trace, A100, AllocatorOptions())
    trials = list(trials_of(trace, replayed, A100.available_bytes))
    assert len(trials) == len(set(trials)) == 5  # two forward, one data, two weight
    assert all(item.reserved_bytes > item.workspace_bytes for item in trials)
    simulated = measurement_of(trace, A100, lowered, replayed)
    assert simulated.trial_bytes == max(item.reserved_bytes for item in trials)
    assert simulated.trial_bytes > replayed.peak_reserved_bytes
    higher = [item for item in trials if item.reserved_bytes > replayed.peak_reserved_bytes]
    assert simulated.tried_bytes == sum(item.workspace_bytes for item in higher)
    small = replayed.peak_reserved_bytes + 200 * MIB
    assert len(list(trials_of(trace, replayed, small))) < len(trials)  # a workspace that does not fit is not tried


@pytest.mark.parametrize("channels_last", [False, True])
def test_depthwise_layers_are_tried_in_channels_last(channels_last: bool) -> None:
    with torch.device("meta"):
        network = nn.Sequential(nn.Conv2d(8, 8, 7, groups=8), nn.Conv2d(8, 8, 3), nn.Flatten())
    job = ModuleJob(network, lambda size: (torch.empty(size, 8, 32, 32, device="meta"),))
    options = {"batch_size": 4, "optimizer": "sgd", "cudnn_benchmark": True, "channels_last": channels_last}
    trace = Simulator(job).trace(options, A100.compute_capability)
    _, replayed = replay_on(trace, A100, AllocatorOptions())
    tried = {item.call for item in trials_of(trace, replayed, A100.available_bytes)}
    assert {call.direction for call in tried if call.is_depthwise} == (
        {"forward", "weight"} if channels_last else set()
    )
    assert {call.direction for call in tried if not call.is_depthwise} == {"forward", "data", "weight"}


def test_a_job_without_the_switch_tries_nothing() -> None:
    network = {"arch": "uniform", "input_channels": 3, "input_size": 30, "num_classes": 10, "base_filters": 64}
    spec = make_spec("cnn", {**network, "depth": 2}, _cnn(cudnn_benchmark=False))
    simulated = simulate(trace_spec(spec), A100, AllocatorOptions())
    assert simulated.trial_bytes is simulated.tried_bytes is None


def test_an_answer_says_what_is_tried_and_its_bound_includes_it() -> None:
    network = {
        "arch": "uniform", "input_channels": 3, "input_size": 30, "num_classes": 10, "depth": 3, "base_filters": 1024,
    }  # fmt: skip
    answers = {}
    for tries in (True, False):
        simulation = Simulator(SpecJob(make_spec("cnn", network, _cnn(cudnn_benchmark=tries)))).simulate({}, [A100])
        answers[tries] = load("universal").answers([Question.of_simulation("cnn", simulation, A100)], 0.01)[0]
    (note,) = [item for item in answers[True].notes if "tries workspaces" in item]
    largest_mib = int(note.split()[-2].replace(",", ""))
    assert largest_mib > 9000
    assert answers[True].safe_mib > 0.9 * largest_mib
    assert answers[False].safe_mib < 0.5 * largest_mib
    assert not any("tries workspaces" in item for item in answers[False].notes)
