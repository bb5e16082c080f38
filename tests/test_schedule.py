"""The schedule of a layer table takes the memory that the simulation of its network takes."""

from dataclasses import replace

import pytest
from made_examples import example_of, mlp_table

from vramcast.device.profiles import load_profile
from vramcast.errors import UserError
from vramcast.jobs.analysis.schedule import Schedule, scheduled_peak
from vramcast.jobs.analysis.schedule.checkpointed import checkpointed_segments
from vramcast.jobs.analysis.schedule.parameters import parameter_shapes
from vramcast.jobs.families import make_spec
from vramcast.jobs.job import SpecJob, detailed_table_of
from vramcast.jobs.spec import LayerRecord, LayerTable
from vramcast.models.baselines.scheduled import Scheduled
from vramcast.simulation.simulator import Simulator
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.training.setup import TrainingSetup

PROFILE = load_profile("a100_40gb")
SEGMENTS = 3 * 20 * MIB
"""Segments of the allocator that placement alone decides; in small jobs they are more than a tenth."""
MLP = {"arch": "pyramid", "input_features": 3000, "output_features": 500, "depth": 5, "norm": "batch", "dropout": 0.2}
CNN = {
    "arch": "residual", "input_channels": 3, "input_size": 64, "num_classes": 100, "depth": 6, "base_filters": 48,
    "norm": "batch",
}  # fmt: skip
ENCODER = {
    "kind": "encoder", "vocabulary": 20_000, "embedding_size": 256, "layers": 4, "heads": 4, "feed_forward_size": 1024,
    "sequence_length": 128, "num_classes": 50, "dropout": 0.1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "network", "training"),
    [
        ("mlp", MLP, TrainingSetup(batch_size=700)),
        ("cnn", CNN, TrainingSetup(batch_size=32, last_batch_size=8)),
        ("cnn", CNN, TrainingSetup(batch_size=32, optimizer="SGD(momentum=0.9)", dtype="bf16")),
        ("transformer", ENCODER, TrainingSetup(batch_size=16, optimizer="AdamW", accumulate=2)),
        ("transformer", ENCODER, TrainingSetup(batch_size=32, dtype="bf16")),
    ],
)
def test_it_takes_what_the_simulation_takes(family, network, training):
    spec = make_spec(family, network, training)
    simulated = Simulator(SpecJob(spec)).simulate({}, [PROFILE]).peaks[PROFILE.name].bounded
    peak = scheduled_peak(detailed_table_of(spec), training, PROFILE)
    assert peak.allocated_bytes == pytest.approx(simulated.allocated_bytes, rel=0.06)
    assert peak.reserved_bytes == pytest.approx(simulated.reserved_bytes, rel=0.1, abs=SEGMENTS)


def test_checkpointing_keeps_less_and_the_second_step_has_the_state():
    spec = make_spec("transformer", ENCODER, TrainingSetup(batch_size=32))
    table = detailed_table_of(spec)
    plain = scheduled_peak(table, spec.training, PROFILE)
    checkpointed = scheduled_peak(table, replace(spec.training, checkpointing=True), PROFILE)
    without_state = scheduled_peak(table, replace(spec.training, optimizer="SGD"), PROFILE)
    assert checkpointed.kept_bytes < plain.kept_bytes / 2
    assert plain.state_bytes - without_state.state_bytes == 2 * 4 * table.parameters


def test_a_batch_costs_what_it_adds():
    table = mlp_table(512, 2048, 2048, 10)
    small, large = (scheduled_peak(table, TrainingSetup(batch_size=size), PROFILE) for size in (1024, 8192))
    assert small.kept_bytes < large.kept_bytes == pytest.approx(8 * small.kept_bytes, rel=0.01)
    assert large.reserved_bytes >= large.allocated_bytes


def test_a_table_without_details_is_read_as_a_chain():
    spec = make_spec("mlp", MLP, TrainingSetup(batch_size=700))
    table = detailed_table_of(spec)
    layers = tuple(LayerRecord(**layer.basis) for layer in table.layers)
    plain = replace(table, layers=layers)
    detailed, guessed = (scheduled_peak(item, spec.training, PROFILE) for item in (table, plain))
    assert guessed.reserved_bytes == pytest.approx(detailed.reserved_bytes, rel=0.1)


def test_parameters_are_those_of_their_layer():
    table = mlp_table(4, 8, 16)
    assert parameter_shapes(table) == [((8, 4), (8,)), (), ((16, 8), (16,))]
    norm = LayerRecord("norm", "LayerNorm", (16,), 16, 32)
    shapes = (*table.trainable_shapes[:2], (16, 8), (16,), (16,), (16,))
    assert parameter_shapes(LayerTable((*table.layers, norm), shapes, 4))[-1] == ((16,), (16,))


def test_segments_are_the_composite_parts_of_lists():
    assert checkpointed_segments(["0", "1", "2"]) == {}
    assert checkpointed_segments(["a.0.x", "a.0.y", "a.1.x", "a.1.y", "head"]) == {1: 0, 3: 2}


def test_the_baseline_adds_the_overhead_of_the_device():
    example = example_of(mlp_table(512, 2048, 10))
    with pytest.raises(UserError, match="expected the layer table of"):
        Scheduled().predict_bytes([example])
    given = replace(example, schedule=Schedule(mlp_table(512, 2048, 10), example.training, PROFILE))
    reserved_bytes = given.scheduled.reserved_bytes
    assert Scheduled().predict_bytes([given]) == [given.overhead_bytes + reserved_bytes]


def test_workspaces_come_from_the_rules_of_the_device():
    spec = make_spec("cnn", CNN, TrainingSetup(batch_size=32))
    table = detailed_table_of(spec)
    without = scheduled_peak(table, spec.training, PROFILE.without_rules)
    assert scheduled_peak(table, spec.training, PROFILE).reserved_bytes > without.reserved_bytes + MIB


def test_tables_that_tell_little_are_scheduled():
    conv = LayerRecord("conv", "Conv2d", (64, 56, 56), 200_704, 9408)
    unused = LayerRecord("unused", "Conv2d", (), 0, 9408)
    table = LayerTable(
        (LayerRecord("first", "ReLU", (3, 224, 224), 0, 0), conv, unused), ((9408,), (64, 3, 7, 7)), 150_528
    )
    peak = scheduled_peak(table, TrainingSetup(batch_size=16), PROFILE)
    assert peak.reserved_bytes > 4 * 16 * 200_704


def test_numbers_beyond_any_memory_do_not_overflow():
    table = mlp_table(2**40, 2**40, 10)
    peak = scheduled_peak(table, TrainingSetup(batch_size=2**31 - 1), PROFILE)
    assert peak.reserved_bytes >= peak.allocated_bytes > 2**45
