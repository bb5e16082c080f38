"""The virtual GPU from spec to row: composition of steps, lowering onto a device, breakdown, profiles."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vramcast.dataset_builder.backends.virtual import trace_spec
from vramcast.dataset_builder.configuration import make_backend
from vramcast.device.profiles import CONF, load_device
from vramcast.errors import UserError
from vramcast.jobs.families import make_spec
from vramcast.jobs.spec import Spec
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.measurement import Status
from vramcast.virtual_gpu.profile import DeviceProfile, parse_profile
from vramcast.virtual_gpu.replay.replay import FREE
from vramcast.virtual_gpu.replay.simulate import lower, simulate
from vramcast.virtual_gpu.replay.timeline import timeline_of
from vramcast.virtual_gpu.tracing.session import trace_training
from vramcast.virtual_gpu.tracing.trace import ConvolutionCall, LibraryCall, Use
from vramcast.virtual_gpu.training.setup import TrainingSetup

DEVICES = sorted(path.stem for path in (CONF / "device").glob("*.yaml"))
PLAIN = DeviceProfile(name="plain", title="Plain", total_mib=4096, compute_capability=8.0, context_mib=100)


def mlp(batch: int = 32, width: int = 256, depth: int = 2, **training: object) -> Spec:
    network = {"arch": "uniform", "input_features": width, "output_features": 10, "depth": depth}
    return make_spec("mlp", network, TrainingSetup(batch_size=batch, **training))


def cnn(batch: int = 4, filters: int = 16, **training: object) -> Spec:
    network = {
        "arch": "uniform", "input_channels": 3, "input_size": 32, "num_classes": 10, "depth": 3,
        "base_filters": filters, "norm": "batch",
    }  # fmt: skip
    return make_spec("cnn", network, TrainingSetup(batch_size=batch, **training))


def measure(spec: Spec, profile: DeviceProfile = PLAIN, options: AllocatorOptions | None = None):
    return simulate(trace_spec(spec), profile, options or AllocatorOptions())


def alive(events):
    live = {}
    for block, size in events:
        if size == FREE:
            del live[block]
        else:
            assert block not in live
            live[block] = size
    return live


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("last", [None, 5])
def test_every_block_is_born_once_and_dies_at_most_once(last, accumulate):
    trace = trace_spec(mlp(last_batch_size=last, accumulate=accumulate, dry_run_batch_size=2))
    live = alive(trace.events)  # fails on a block that is born or dies twice
    assert {Use.PARAMETERS, Use.GRADIENTS, Use.OPTIMIZER_STATE} <= {trace.uses[block] for block in live}


def test_what_lives_between_steps_is_what_training_needs():
    """Parameters, gradients and Adam's two moments: four copies of the parameters."""
    spec = mlp()
    trace = trace_spec(spec)
    live = alive(trace.events)
    totals = dict.fromkeys(Use, 0)
    for block, size in live.items():
        totals[trace.uses[block]] += size
    parameters = 4 * (2 * (256 * 256 + 256) + 256 * 10 + 10)
    assert totals[Use.PARAMETERS] == totals[Use.GRADIENTS] == parameters
    assert totals[Use.OPTIMIZER_STATE] == 2 * parameters


def test_copied_steps_equal_steps_that_really_run():
    """Two epochs composed from copies come to the same peaks as a longer run of the same steps."""
    spec = mlp(batch=512, width=700, last_batch_size=77)
    trace = trace_spec(spec)
    few, many = (simulate(trace_training(*_subject(spec), epochs), PLAIN, AllocatorOptions()) for epochs in (1, 4))
    assert many.requested_bytes == few.requested_bytes == simulate(trace, PLAIN, AllocatorOptions()).requested_bytes


def _subject(spec: Spec):
    from vramcast.jobs.families import plan_of
    from vramcast.jobs.subject import build_subject, make_inputs

    plan = plan_of(spec)
    return build_subject(plan), lambda size: make_inputs(plan, size), spec.training


def test_peaks_are_ordered_and_the_breakdown_adds_up():
    found = measure(cnn(last_batch_size=3))
    assert found.status is Status.OK
    assert 0 < found.requested_bytes <= found.allocated_bytes <= found.reserved_bytes < found.device_used_bytes
    assert sum(found.breakdown.values()) == found.device_used_bytes
    assert found.breakdown["context"] == 100 * MIB
    assert found.breakdown["parameters"] > 0
    assert found.breakdown["activations"] > 0


def test_a_card_that_is_too_small_is_out_of_memory_and_says_so():
    found = measure(mlp(batch=4096, width=4096, depth=6), replace(PLAIN, total_mib=512))
    assert found.status is Status.OOM
    assert "CUDA out of memory" in found.evidence


@settings(max_examples=15, deadline=None)
@given(batch=st.integers(1, 200), more=st.integers(1, 100))
def test_the_peak_grows_with_the_batch(batch, more):
    small, large = (measure(mlp(batch=size)).requested_bytes for size in (batch, batch + more))
    assert small < large


def test_the_same_answer_on_every_run():
    spec = cnn(last_batch_size=3, dry_run_batch_size=2)
    assert measure(spec) == measure(spec)
    assert trace_spec(spec).events == trace_spec(spec).events


@pytest.mark.parametrize(
    ("smaller", "larger"),
    [
        (mlp(optimizer="SGD"), mlp(optimizer="SGD(momentum=0.9)")),
        (mlp(optimizer="SGD(momentum=0.9)"), mlp(optimizer="Adam")),
        (cnn(batch=64, checkpointing=True), cnn(batch=64)),
        (mlp(batch=2048, dtype="bf16"), mlp(batch=2048)),
        (mlp(width=900, implementation="single"), mlp(width=900, implementation="foreach")),
    ],
)
def test_what_should_save_memory_does(smaller, larger):
    assert measure(smaller).requested_bytes < measure(larger).requested_bytes


def test_a_workspace_that_does_not_fit_is_done_without():
    call = {"direction": None, "copies": 1e6}
    greedy = parse_profile({**_settings(PLAIN), "convolution": [call]})
    found = measure(cnn(), greedy)
    assert found.status is Status.OK
    assert found.breakdown["workspace"] < 100 * MIB


def _settings(profile: DeviceProfile) -> dict[str, object]:
    return {"name": "x", "title": "X", "total_mib": profile.total_mib, "compute_capability": 8.0, "context_mib": 100}


def test_lowering_leaves_out_what_the_device_does_not_take():
    trace = trace_spec(cnn())
    assert any(isinstance(call, ConvolutionCall) for call in trace.calls)
    without = lower(trace, replace(PLAIN, cublas_workspace_bytes=0, cublaslt_workspace_bytes=0))
    assert not without.workspaces
    assert all(trace.uses[block] != Use.WORKSPACE for block, _ in without.events)
    alive(without.events)


def test_workspace_rules_count_padded_copies_and_the_first_that_fits():
    rules = [
        {"direction": "forward", "copies": 1.0},
        {"max_channels": 8, "copies": 2.0},
        {"min_channels": 20, "max_size": 4, "copies": 3.0},
        {"copies": 1.0, "weight_copies": 5.0},
    ]
    profile = parse_profile({**_settings(PLAIN), "convolution": rules})
    narrow = ConvolutionCall("forward", (2, 3, 8, 8), (6, 3, 3, 3), (2, 6, 8, 8), (1, 1), 1)
    copies = 4 * (2 * 4 * 64 + 2 * 8 * 64 + 8 * 4 * 9)  # channels filled up to a multiple of four
    assert profile.workspace_bytes(narrow) == copies
    assert profile.workspace_bytes(replace(narrow, direction="data")) == 2 * copies
    wide = ConvolutionCall("weight", (1, 16, 4, 4), (32, 16, 3, 3), (1, 32, 4, 4), (1, 1), 1)
    assert profile.workspace_bytes(wide) == 3 * 4 * (16 * 16 + 32 * 16 + 32 * 16 * 9)
    larger = replace(wide, x=(1, 16, 8, 8), y=(1, 32, 8, 8))
    assert profile.workspace_bytes(larger) == 4 * (16 * 64 + 32 * 64 + 5 * 32 * 16 * 9)
    assert profile.workspace_bytes(LibraryCall("cublas")) == 8_519_680


@pytest.mark.parametrize("name", DEVICES)
def test_every_shipped_profile_is_read_and_measures(name):
    profile = parse_profile(load_device(name))
    assert profile.name == name
    assert 0 < profile.context_mib < profile.total_mib
    found = measure(cnn(), profile)
    assert found.status is Status.OK
    assert found.device_used_bytes >= profile.context_mib * MIB


@pytest.mark.parametrize("changed", [{"convolution": 3}, {"convolution": [{"copys": 1}]}, {"memory": 3}])
def test_a_profile_that_makes_no_sense_is_refused(changed):
    with pytest.raises(UserError, match="expected"):
        parse_profile({**_settings(PLAIN), **changed})


def test_rows_of_this_backend_say_that_they_are_simulated():
    backend = make_backend({"backend": {"name": "virtual", "allocator": ""}, "device": load_device("a100_40gb")})
    outcome = backend.measure(mlp())
    assert (backend.origin, backend.device) == ("simulated", "a100_40gb")
    assert outcome.measurement.seconds > 0


def test_allocator_options_reach_the_allocator():
    device, spec = load_device("a100_40gb"), mlp(batch=3000, width=1500)
    classic, expandable = (
        make_backend({"backend": {"name": "virtual", "allocator": text}, "device": device}).measure(spec)
        for text in ("", "expandable_segments:True")
    )
    assert expandable.measurement.requested_bytes == classic.measurement.requested_bytes
    assert expandable.measurement.reserved_bytes != classic.measurement.reserved_bytes


def test_frozen_parameters_have_neither_gradient_nor_state():
    with torch.device("meta"):
        subject = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
    subject[0].requires_grad_(False)
    trace = trace_training(subject, lambda size: (torch.empty(size, 64, device="meta"),), TrainingSetup(batch_size=8))
    state = sum(size for block, size in alive(trace.events).items() if trace.uses[block] == Use.OPTIMIZER_STATE)
    assert state == 2 * 4 * (64 * 4 + 4)


def test_a_timeline_ends_where_the_figures_say():
    trace = trace_spec(cnn(filters=64))
    found, measured = timeline_of(trace, PLAIN), simulate(trace, PLAIN, AllocatorOptions())
    total = [sum(values) for values in zip(*found.requested_bytes.values(), strict=True)]
    assert max(total) == measured.requested_bytes
    assert max(found.reserved_bytes) == measured.reserved_bytes
    assert min(total) >= 0
    assert all(reserved >= requested for reserved, requested in zip(found.reserved_bytes, total, strict=True))
    assert found.context_bytes == measured.device_used_bytes - measured.reserved_bytes
    assert max(found.requested_bytes["parameters"]) == measured.breakdown["parameters"]


def test_a_timeline_stops_at_the_event_that_does_not_fit():
    trace = trace_spec(mlp(width=2048, depth=8))
    small = replace(PLAIN, total_mib=300)
    found = timeline_of(trace, small)
    assert len(found.reserved_bytes) < len(trace.events)
    assert max(found.reserved_bytes) <= small.capacity_bytes(convolutions=False)


def test_an_uncalibrated_profile_says_so_in_every_answer():
    assert measure(mlp()).notes == ("the device profile plain is not calibrated on measurements",)
    assert measure(mlp(), replace(PLAIN, calibrated_on="thirty rows")).notes == ()


def test_pointwise_kernels_can_have_a_rule_of_their_own():
    rules = [{"pointwise": True, "copies": 1.0}, {"copies": 3.0}]
    profile = parse_profile({**vars(PLAIN), "convolution": rules})
    shapes = {"x": (2, 4, 8, 8), "y": (2, 4, 8, 8), "stride": (1, 1), "groups": 1}
    narrow = ConvolutionCall("forward", weight=(4, 4, 1, 1), **shapes)
    wide = ConvolutionCall("forward", weight=(4, 4, 3, 3), **shapes)
    assert profile.workspace_bytes(narrow) == 4 * (2 * 2 * 4 * 64 + 16)
    assert profile.workspace_bytes(wide) == 3 * 4 * (2 * 2 * 4 * 64 + 16 * 9)
