"""What decides the reserved memory of convolutional networks: workspace rules, batch norm, and the order of blocks."""

from dataclasses import replace

import pytest

from vramcast.dataset_builder.backends.virtual import trace_spec
from vramcast.dataset_builder.store.importers.timm import LAYOUT
from vramcast.device.profiles import load_device
from vramcast.jobs.families import make_spec
from vramcast.jobs.spec import Spec
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions, CachingAllocator
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.profile import DeviceProfile, parse_profile
from vramcast.virtual_gpu.replay.replay import EMPTY_CACHE, FREE, replay
from vramcast.virtual_gpu.replay.simulate import lower, simulate
from vramcast.virtual_gpu.replay.timeline import timeline_of
from vramcast.virtual_gpu.tracing.trace import ConvolutionCall, Tracer, Use
from vramcast.virtual_gpu.training.setup import TrainingSetup

SETTINGS = {"name": "x", "title": "X", "total_mib": 40960, "compute_capability": 8.0, "context_mib": 100}
A100 = parse_profile(load_device("a100_40gb_gpumemnet_2024"))


def call(direction: str, inputs: int, outputs: int, size: int = 64, kernel: int = 3, batch: int = 2) -> ConvolutionCall:
    shapes = ((batch, inputs, size, size), (outputs, inputs, kernel, kernel), (batch, outputs, size, size))
    return ConvolutionCall(direction, *shapes, (1, 1), 1)


def copies_bytes(item: ConvolutionCall) -> int:
    """Input, output and weight once each, channels filled up to four."""
    up = [-(-channels // 4) * 4 for channels in item.weight[:2]]
    places = item.x[0] * item.x[2] * item.x[3]
    return 4 * (places * sum(up) + up[0] * up[1] * item.weight[2] * item.weight[3])


def cnn(norm: str = "none", batch: int = 4, **network: object) -> Spec:
    factors = {
        "arch": "uniform", "input_channels": 3, "input_size": 32, "num_classes": 10, "depth": 2, "base_filters": 50,
    }  # fmt: skip
    return make_spec("cnn", {**factors, "norm": norm, **network}, TrainingSetup(batch_size=batch))


@pytest.mark.parametrize(
    ("condition", "fits", "fits_not"),
    [
        ({"max_input_channels": 3}, call("weight", 3, 64), call("weight", 4, 64)),
        ({"max_output_channels": 43}, call("forward", 600, 43), call("forward", 43, 44)),
        ({"min_input_channels": 128}, call("forward", 128, 32), call("forward", 127, 500)),
        ({"kernel": 3}, call("data", 64, 64), call("data", 64, 64, kernel=5)),
        ({"places": 64}, call("forward", 64, 64, size=8), call("forward", 64, 64, size=12)),  # 2 x 64, 2 x 144
        ({"aligned": True}, call("forward", 44, 48), call("forward", 44, 50)),
        ({"aligned_outputs": True}, call("forward", 45, 48), call("forward", 48, 45)),
        ({"min_samples": 45}, call("weight", 64, 64, batch=45), call("weight", 64, 64, batch=44)),
        ({"max_tiles": 9}, call("weight", 128, 128), call("weight", 128, 129)),  # 1 x 9 tiles of 128 x 128; 2 x 9
    ],
)
def test_a_condition_tells_calls_apart(
    condition: dict[str, object], fits: ConvolutionCall, fits_not: ConvolutionCall
) -> None:
    profile = parse_profile({**SETTINGS, "convolution": [{**condition, "copies": 1.0}]})
    assert profile.workspace_bytes(fits) == copies_bytes(fits)
    assert profile.workspace_bytes(fits_not) == 0


def test_some_calls_take_more_than_their_copies() -> None:
    profile = parse_profile({**SETTINGS, "convolution": [{"copies": 1.0, "extra_mib": 5}]})
    item = call("weight", 64, 64)
    assert profile.workspace_bytes(item) == copies_bytes(item) + 5 * MIB
    assert profile.convolution[0].label == "all others"


@pytest.mark.parametrize(
    ("item", "copies", "extra_mib"),
    [
        (call("weight", 3, 111), 0, 0),  # the first layer's gradient is computed in place
        (call("forward", 64, 64), 0, 0),  # aligned channels, few outputs
        (call("forward", 72, 70), 1, 0),
        (call("forward", 200, 32, size=62), 0, 0),
        (call("weight", 200, 32), 1, 5),
        (call("weight", 33, 33), 1, 0),
        (call("data", 70, 70), 1, 0),
        (call("weight", 70, 70), 1, 5),
        (call("weight", 300, 330), 1, 0),  # tiles enough for the whole card
        (call("weight", 1400, 1700), 1, 0),
        (call("weight", 70, 72, kernel=1), 1, 0),
        (call("weight", 72, 72, kernel=1), 0, 0),  # a product of matrices as they lie
    ],
)
def test_the_a100_of_the_cnn_rows(item: ConvolutionCall, copies: int, extra_mib: int) -> None:
    assert A100.workspace_bytes(item) == copies * copies_bytes(item) + extra_mib * MIB


def test_the_a100_writes_outputs_in_place_if_their_channels_are_aligned() -> None:
    item = call("forward", 70, 72)
    assert A100.workspace_bytes(item) == copies_bytes(item) - 4 * 2 * 72 * 64 * 64


@pytest.mark.parametrize(
    ("item", "sums"),
    [
        (call("weight", 420, 452, batch=3), 3),
        (call("weight", 420, 452, batch=2), 0),  # the dry run
        (call("weight", 600, 452, batch=3), 0),
        (call("weight", 400, 440, batch=46), 2),
        (call("weight", 400, 440, batch=44), 0),
    ],
)
def test_the_a100_adds_partial_sums_for_wide_outputs_and_large_batches(item: ConvolutionCall, sums: int) -> None:
    outputs, inputs = item.weight[:2]
    assert A100.workspace_bytes(item) == copies_bytes(item) + sums * 4 * 9 * outputs * inputs


@pytest.mark.parametrize(
    ("inputs", "batch", "sums"),
    [(1339, 8, 0), (1340, 8, 1), (1386, 8, 1), (1398, 8, 14), (1464, 8, 8), (1465, 8, 0), (1400, 2, 0)],
)
def test_the_a100_splits_forward_passes_with_wide_inputs(inputs: int, batch: int, sums: int) -> None:
    """Partial sums are whole tiles of 128 x 128, with a counter for each."""
    item = call("forward", inputs, 70, size=10, batch=batch)
    tiles = -(-batch * 100 // 128)
    split = 4 * tiles * (sums * 128 * 128 + sums + 1) + 175 if sums else 0
    assert A100.workspace_bytes(item) == copies_bytes(item) + split


def test_aligned_outputs_are_written_where_they_belong() -> None:
    item = call("forward", 72, 96)
    assert A100.workspace_bytes(item) == 4 * (2 * 72 * 64 * 64 + 72 * 96 * 9)


def test_a_dense_layer_takes_what_winograd_takes() -> None:
    """Tiles of 4 x 4 become 6 x 6: 36 / 16 of the images, 36 / 9 of the weight."""
    item = call("forward", 160, 32)
    assert A100.workspace_bytes(item) == 4 * (36 * 2 * 16 * 16 * (160 + 32) + 36 * 160 * 32)
    assert A100.workspace_bytes(call("forward", 160, 32, size=62)) == 0  # 7,688 places are no multiple of 64


def test_each_layer_of_a_dense_block_wants_more_than_the_last_one_gave_back() -> None:
    """Rows whose sides are multiples of 8 hold a workspace for every layer; their neighbours hold none of them."""
    networks = {"arch": "dense", "input_channels": 1, "num_classes": 10, "depth": 28, "base_filters": 32}
    specs = [make_spec("cnn", {**networks, "input_size": size}, TrainingSetup(batch_size=16)) for size in (62, 64)]
    simulated = [simulate(trace_spec(spec), A100, AllocatorOptions()) for spec in specs]
    shares = [(item.reserved_bytes or 0) / (item.allocated_bytes or 1) for item in simulated]
    assert shares[1] > 1.15 * shares[0]


def test_a_little_more_than_the_last_workspace_means_a_segment_of_its_own() -> None:
    """Why two workspaces of almost one size count twice in what is reserved (rows of 44 to 128 channels)."""
    spec = cnn(batch=32, input_size=64)
    rules = [{"max_input_channels": 3, "copies": 0.0}, {"direction": "forward", "copies": 0.0}, {"copies": 1.0}]
    even = parse_profile({**SETTINGS, "convolution": rules})
    uneven = parse_profile(
        {**SETTINGS, "convolution": [*rules[:2], {"direction": "weight", "copies": 1.0, "extra_mib": 5}, rules[2]]}
    )
    trace = trace_spec(spec)
    once, twice = (simulate(trace, item, AllocatorOptions()).reserved_bytes for item in (even, uneven))
    workspace = even.workspace_bytes(next(item for item in trace.calls if getattr(item, "direction", "") == "data"))
    assert once is not None
    assert twice is not None
    assert 0.8 * workspace < twice - once < 1.3 * workspace


def test_batch_norm_over_images_adds_to_what_cudnn_takes() -> None:
    profile = DeviceProfile(**{**SETTINGS, "cudnn_mib": 250, "batch_norm_mib": 40})
    plain, normed = (trace_spec(cnn(norm)) for norm in ("none", "batch"))
    assert (plain.has_convolutions, plain.has_batch_norm) == (True, False)
    assert (normed.has_convolutions, normed.has_batch_norm) == (True, True)
    contexts = [simulate(item, profile, AllocatorOptions()).breakdown["context"] for item in (plain, normed)]
    assert contexts == [350 * MIB, 390 * MIB]
    assert profile.capacity_bytes(True) - profile.capacity_bytes(True, True) == 40 * MIB


def test_a_batch_norm_without_images_does_not_load_cudnn() -> None:
    network = {"arch": "uniform", "input_features": 8, "output_features": 4, "depth": 2, "norm": "batch"}
    trace = trace_spec(make_spec("mlp", network, TrainingSetup(batch_size=4)))
    assert not trace.has_batch_norm


def test_inputs_are_gone_before_the_next_batch_comes() -> None:
    trace = trace_spec(replace(cnn(), training=TrainingSetup(batch_size=4, last_batch_size=3)))
    live: set[int] = set()
    for block, size in trace.events:
        if trace.uses[block] == Use.INPUTS:
            if size == FREE:
                live.remove(block)
            else:
                assert not live
                live.add(block)


def test_trying_algorithms_empties_the_cache_at_the_first_call_of_each_kind() -> None:
    spec = cnn(depth=3)
    plain, tried = (
        trace_spec(replace(spec, training=TrainingSetup(batch_size=4, last_batch_size=3, cudnn_benchmark=flag)))
        for flag in (False, True)
    )
    emptied = [index for index, event in enumerate(tried.events) if event == EMPTY_CACHE]
    kinds = {item for item in tried.calls if isinstance(item, ConvolutionCall)}
    assert len(emptied) == len(kinds) == 2 * 5  # two batch sizes; two forward, one data, two weight
    assert [event for event in tried.events if event != EMPTY_CACHE] == plain.events


def test_depthwise_convolutions_try_nothing() -> None:
    tracer = Tracer({}, cudnn_benchmark=True)
    shapes = ((2, 8, 4, 4), (8, 1, 3, 3), (2, 8, 4, 4))
    tracer.workspace(ConvolutionCall("forward", *shapes, (1, 1), 8))
    assert EMPTY_CACHE not in tracer.trace.events
    tracer.workspace(ConvolutionCall("forward", *shapes, (1, 1), 4))
    assert EMPTY_CACHE not in tracer.trace.events
    tracer.workspace(ConvolutionCall("forward", shapes[0], (8, 2, 3, 3), shapes[2], (1, 1), 4))
    assert tracer.trace.events.count(EMPTY_CACHE) == 1


def test_an_emptied_cache_is_no_longer_reserved() -> None:
    events = [(0, 30 * MIB), (1, 50 * MIB), (0, FREE), EMPTY_CACHE, (2, 40 * MIB), (1, FREE), (2, FREE)]
    found = replay(events, CachingAllocator(), timeline=True)
    assert list(found.reserved_timeline or ()) == [item * MIB for item in (30, 80, 80, 50, 90, 90, 90)]
    kept = replay([event for event in events if event != EMPTY_CACHE], CachingAllocator())
    assert (found.peak_reserved_bytes, kept.peak_reserved_bytes) == (90 * MIB, 120 * MIB)
    assert found.live_at_peak == (1, 2)


def test_timm_rows_are_trained_as_its_script_does() -> None:
    record = {"model": "resnet18", "batch_size": "8", "num_classes": "1000", "timm_default_input": "[3, 224, 224]"}
    training = LAYOUT.spec(record).training
    assert training.cudnn_benchmark
    assert "weight_decay" in training.optimizer
    assert training.prefetched_batches == 2


def test_a_timeline_goes_on_past_an_emptied_cache() -> None:
    trace = trace_spec(replace(cnn(), training=TrainingSetup(batch_size=4, cudnn_benchmark=True)))
    found = timeline_of(trace, DeviceProfile(**SETTINGS))
    lowered = lower(trace, DeviceProfile(**SETTINGS))
    assert len(found.reserved_bytes) == len(lowered.events)
    assert min(min(values) for values in found.requested_bytes.values()) == 0
