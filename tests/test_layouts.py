"""Workspaces in half precision and with channels last, and training in that layout."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from vramcast import VirtualGPU
from vramcast.dataset_builder.backends.cuda import training_run as cuda_run
from vramcast.dataset_builder.backends.virtual import VirtualBackend, trace_spec
from vramcast.device.profiles import load_profile
from vramcast.errors import UserError
from vramcast.jobs.emit import emit
from vramcast.jobs.families import make_spec
from vramcast.jobs.job import ModuleJob
from vramcast.jobs.subject import in_channels_last
from vramcast.simulation.result import Simulation
from vramcast.simulation.simulator import Simulator
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.cudnn.layouts import copies_needed, known_workspace_bytes
from vramcast.virtual_gpu.profile import parse_profile
from vramcast.virtual_gpu.tracing.trace import ConvolutionCall
from vramcast.virtual_gpu.training.setup import TrainingSetup, check_trained_whole
from vramcast.virtual_gpu.training.step import images_channels_last

DIRECTIONS = ("forward", "data", "weight")
A100, H100, T4 = 8.0, 9.0, 7.5
PLACES = 2 * 8 * 8


def call(
    direction: str = "forward", inputs: int = 16, outputs: int = 32, kernel: int = 3, groups: int = 1, **more: object
) -> ConvolutionCall:
    shapes = ((2, inputs, 8, 8), (outputs, inputs // groups, kernel, kernel), (2, outputs, 8, 8))
    return ConvolutionCall(direction, *shapes, (1, 1), groups, **more)  # type: ignore[arg-type]


def half(*args: object, **more: object) -> ConvolutionCall:
    return call(*args, dtype="float16", **more)  # type: ignore[arg-type]


def known(item: ConvolutionCall, capability: float = A100, padded: int | None = None) -> int | None:
    return known_workspace_bytes(item, capability, padded)


class TestHalfPrecision:
    @pytest.mark.parametrize("direction", ["forward", "data"])
    def test_every_tensor_in_nchw_is_copied(self, direction):
        assert known(half(direction)) == 2 * (PLACES * (16 + 32) + 16 * 32 * 9) + 16

    def test_a_weight_of_size_one_is_alike_in_both_layouts(self):
        assert known(half(kernel=1)) == 2 * PLACES * (16 + 32) + 16

    @pytest.mark.parametrize(("capability", "sums"), [(T4, 5 * MIB), (A100, 5 * MIB), (H100, 0)])
    def test_the_gradient_of_a_weight_has_partial_sums_before_hopper(self, capability, sums):
        assert known(half("weight"), capability) == known(half("forward")) + sums
        assert known(half("weight", channels_last=True), capability) == sums

    @pytest.mark.parametrize("direction", ["forward", "data"])
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_nothing_is_copied_with_channels_last(self, direction, dtype):
        assert known(call(direction, dtype=dtype, channels_last=True)) == 0

    def test_odd_channels_are_padded_to_eight(self):
        assert known(half("data", inputs=20)) == 2 * (PLACES * (24 + 32) + 24 * 32 * 9) + 16

    def test_with_channels_last_only_odd_tensors_are_copied(self):
        assert known(half("data", inputs=20, channels_last=True)) == 2 * (PLACES * 24 + 24 * 32 * 9) + 16

    def test_few_channels_of_a_group_are_padded_to_a_power_of_two(self):
        padded = known(half("data", inputs=72, outputs=72, groups=3))
        assert padded == 2 * (2 * PLACES * 3 * 32 + 3 * 32 * 32 * 9) + 16
        assert known(half("data", inputs=128, outputs=128, groups=32, channels_last=True)) == 0

    def test_the_first_layer_has_a_kernel_without_workspace(self):
        assert known(half("forward", inputs=3)) == 0
        assert known(half("weight", inputs=3)) > 5 * MIB

    def test_a_single_place_has_no_layout(self):
        item = replace(half("data"), x=(2, 16, 1, 1), y=(2, 32, 1, 1))
        assert known(item) == 0

    def test_a_depthwise_convolution_in_nchw_is_decided_by_rules(self):
        assert known(half(inputs=32, groups=32)) is None


class TestDepthwiseWithChannelsLast:
    @staticmethod
    def gradient(kernel: int = 7, channels: int = 64, **more: object) -> ConvolutionCall:
        return call("weight", channels, channels, kernel, groups=channels, channels_last=True, **more)

    def test_wide_kernels_pad_groups_to_four_channels_in_half_precision(self):
        copies = 4 * 2 * (2 * PLACES * 64 + 64 * 49)
        assert known(self.gradient(dtype="bfloat16")) == copies

    @pytest.mark.parametrize("kernel", [3, 5])
    def test_narrow_kernels_take_nothing(self, kernel):
        assert known(self.gradient(kernel), padded=1) == known(self.gradient(kernel, dtype="float16")) == 0

    @pytest.mark.parametrize(("padded", "channels", "pads"), [(96, 95, False), (96, 96, True), (None, 512, False)])
    def test_with_32_bits_a_profile_says_from_how_many_channels(self, padded, channels, pads):
        expected = 16 * (2 * PLACES * channels + channels * 49) if pads else 16 * 4 * PLACES
        assert known(self.gradient(channels=channels), padded=padded) == expected

    @pytest.mark.parametrize(("channels", "outputs", "pads"), [(63, 63, False), (64, 64, True), (64, 128, False)])
    def test_a_stride_has_a_number_of_its_own_if_there_are_as_many_outputs(self, channels, outputs, pads):
        item = replace(call("weight", channels, outputs, 7, channels, channels_last=True), stride=(2, 2))
        padded = known_workspace_bytes(item, A100, 128, padded_strided_channels=64)
        assert (padded == 16 * sum(map(math.prod, item.shapes.values()))) == pads
        assert known_workspace_bytes(item, A100, 128) == 16 * 4 * PLACES

    @pytest.mark.parametrize(("channels", "pads"), [(32, True), (256, True), (264, False)])
    def test_hopper_pads_up_to_256_channels_with_32_bits(self, channels, pads):
        expected = 16 * (2 * PLACES * channels + channels * 49) if pads else 16 * 4 * PLACES
        assert known(self.gradient(channels=channels), H100, padded=96) == expected

    @pytest.mark.parametrize("direction", ["forward", "data"])
    def test_other_directions_take_nothing(self, direction):
        assert known(replace(self.gradient(), direction=direction), padded=1) == 0


class TestChannelsLastWith32Bits:
    @pytest.mark.parametrize(
        ("direction", "most"),
        [("forward", (1, 0, 1)), ("data", (0, 1, 1)), ("weight", (1, 1, math.inf))],
    )
    def test_what_a_call_writes_is_not_copied(self, direction, most):
        assert copies_needed(call(direction, channels_last=True), A100) == most
        assert copies_needed(call(direction), A100) == (math.inf,) * 3

    def test_before_tf32_only_the_gradient_of_the_input_has_copies(self):
        most = [copies_needed(call(direction, channels_last=True), T4) for direction in DIRECTIONS]
        assert most == [(0, 0, 0), (math.inf,) * 3, (0, 0, 0)]

    def test_hopper_copies_nothing(self):
        assert known(call(channels_last=True), H100) == 0
        assert known(call(), H100) is None
        assert known(call(channels_last=True), A100) is None

    @pytest.mark.parametrize(
        ("direction", "before", "after"),
        [("forward", math.inf, (1, 0, 1)), ("data", math.inf, (1, 1, 1)), ("weight", math.inf, (1, 1, math.inf))],
    )
    def test_odd_channels_are_padded_in_copies(self, direction, before, after):
        odd = call(direction, inputs=18, channels_last=True)
        assert copies_needed(odd, T4) == (before,) * 3
        assert copies_needed(odd, A100) == after
        assert known(odd, H100) is None

    def test_a_profile_limits_the_copies_of_its_rules(self):
        profile = parse_profile({**SETTINGS, "convolution": [{"copies": 2.25}]})
        assert profile.workspace_bytes(call("forward")) == 2.25 * 4 * (PLACES * 48 + 16 * 32 * 9)
        assert profile.workspace_bytes(call("forward", channels_last=True)) == 4 * (PLACES * 16 + 16 * 32 * 9)


def test_a_rule_set_gives_a_profile_its_padded_channels():
    assert load_profile("a100_40gb").padded_depthwise_channels == 96
    assert load_profile("a100_40gb_timm_2024").padded_depthwise_channels == 128
    assert load_profile("a100_40gb_timm_2024").padded_strided_channels == 64
    assert load_profile("rtx_4060").padded_depthwise_channels == 128
    assert load_profile("rtx_3060").padded_depthwise_channels is None


SETTINGS = {"name": "x", "title": "X", "total_mib": 1, "compute_capability": A100, "context_mib": 1}


def test_a_profile_without_rules_takes_no_workspace():
    assert parse_profile(SETTINGS).workspace_bytes(half()) == 0


@pytest.mark.parametrize("count", [0, 1.5, "many"])
@pytest.mark.parametrize("name", ["padded_depthwise_channels", "padded_strided_channels"])
def test_padded_channels_are_a_count(name, count):
    with pytest.raises(UserError, match=f"expected {name} of the device profile x to be"):
        parse_profile({**SETTINGS, name: count})


@pytest.mark.parametrize(
    ("item", "capability", "runs"),
    [
        (call(dtype="bfloat16"), T4, False),
        (call(dtype="bfloat16"), A100, True),
        (half(), T4, True),
        (replace(half(), x=(0, 16, 8, 8), y=(0, 32, 8, 8)), A100, False),
    ],
)
def test_what_cudnn_does_not_run_takes_no_workspace(item, capability, runs):
    profile = parse_profile({**SETTINGS, "compute_capability": capability, "convolution": [{"copies": 2.25}]})
    assert (profile.workspace_bytes(item) > 0) is runs


NETWORK = {"arch": "uniform", "input_channels": 3, "input_size": 32, "num_classes": 10, "depth": 3, "base_filters": 64}


class TestTraining:
    @staticmethod
    def calls(**training: object) -> list[ConvolutionCall]:
        spec = make_spec("cnn", NETWORK, TrainingSetup(batch_size=8, **training))  # type: ignore[arg-type]
        return [item for item in trace_spec(spec).calls if isinstance(item, ConvolutionCall)]

    def test_every_convolution_has_channels_last(self):
        assert all(item.channels_last for item in self.calls(channels_last=True))
        assert not any(item.channels_last for item in self.calls())

    @pytest.mark.parametrize("device", ["t4", "a100_40gb", "rtx_4090", "h100_80gb"])
    def test_mixed_precision_takes_less_workspace_with_channels_last(self, device):
        profile = load_profile(device)
        last, first = (
            sum(map(profile.workspace_bytes, self.calls(autocast="fp16", channels_last=flag))) for flag in (True, False)
        )
        assert last < first

    def test_a_printed_script_converts_network_and_images(self):
        spec = make_spec("cnn", NETWORK, TrainingSetup(batch_size=8, channels_last=True))
        script = emit(spec)
        assert ".train().to(memory_format=torch.channels_last)" in script
        assert "images_channels_last(random_inputs(" in script
        compile(script, "script", "exec")
        assert (
            "torch.channels_last)\n"
            not in emit(replace(spec, training=TrainingSetup(batch_size=8))).split("def main")[1]
        )

    @pytest.mark.parametrize("prefetched", [0, 1])
    def test_a_measured_run_converts_network_and_images(self, monkeypatch, prefetched):
        seen: list[tuple[bool, bool]] = []
        steps = cuda_run.training_steps

        def watched(subject: nn.Module, optimizer: object, batches: object, *rest: object):
            weights = [item.weight for item in subject.modules() if isinstance(item, nn.Conv2d)]
            last = all(item.is_contiguous(memory_format=torch.channels_last) for item in weights)

            def look(batch):
                for images, *_ in batch:
                    seen.append((last, images.is_contiguous(memory_format=torch.channels_last)))
                    yield (images,)

            return steps(subject, optimizer, map(look, batches), *rest)

        monkeypatch.setattr(cuda_run, "training_steps", watched)
        training = TrainingSetup(batch_size=2, channels_last=True, prefetched_batches=prefetched)
        spec = make_spec("cnn", NETWORK, training)
        list(cuda_run.training_run(spec, epochs=1, device="cpu"))
        assert seen and all(item == (True, True) for item in seen)


def test_a_measured_run_allocates_what_is_simulated():
    network = {**NETWORK, "depth": 3, "base_filters": 512}
    spec = make_spec("cnn", network, TrainingSetup(batch_size=2, channels_last=True))
    simulated = VirtualBackend(load_profile("a100_40gb")).measure(spec).measurement
    with VirtualGPU("a100_40gb"):
        list(cuda_run.training_run(spec, epochs=1, device="cuda"))
        measured = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    assert measured == (simulated.allocated_bytes, simulated.reserved_bytes)


def test_a_network_that_is_converted_on_the_host_stays_there():
    with VirtualGPU("a100_40gb"):
        layer = nn.Conv2d(512, 512, 3, bias=False).to(memory_format=torch.channels_last)  # 2^20 weights have no data
        assert (layer.weight.device.type, torch.cuda.memory_allocated()) == ("cpu", 0)
        assert layer.weight.is_contiguous(memory_format=torch.channels_last)
        layer.cuda()
        assert torch.cuda.memory_allocated() == 4 * layer.weight.numel()


class Described(nn.Module):
    """A network that takes its images in a dictionary, and with `live` runs on CUDA only."""

    def __init__(self, live: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(16, 64, 3), nn.Conv2d(64, 32, 3)
        self.live = live

    def forward(self, images):
        if self.live:
            images = images * torch.ones(1).cuda()
        return self.second(self.first(images)).mean((2, 3))


def simulation(channels_last: bool, live: bool = False, **more: object) -> Simulation:
    with torch.device("meta"):
        network = Described(live)
    job = ModuleJob(network, lambda size: {"images": torch.empty(size, 16, 32, 32, device="meta")})
    options = {"batch_size": 64, "optimizer": "sgd", "autocast": "fp16", "channels_last": channels_last, **more}
    return Simulator(job).simulate(options, [load_profile("a100_40gb")])


@pytest.mark.parametrize("live", [False, True])
def test_images_in_a_dictionary_change_their_layout(live):
    first, last = (simulation(flag, live).peaks["a100_40gb"].bounded for flag in (False, True))
    assert last.allocated_bytes < 0.9 * first.allocated_bytes


def test_a_network_that_needs_cuda_takes_what_a_plain_one_does_with_channels_last():
    plain, live = (simulation(True, flag).peaks["a100_40gb"].bounded for flag in (False, True))
    images_bytes = 64 * 16 * 32 * 32 * 4  # the product is another tensor
    assert 0 <= live.allocated_bytes - plain.allocated_bytes <= 1.5 * images_bytes


@pytest.mark.parametrize("strategy", ["fsdp2", "hsdp"])
def test_fsdp2_refuses_channels_last(strategy):
    parallel = f"{strategy}(world_size=4, nodes=2)"
    with pytest.raises(UserError, match="expected no channels_last beside parallel"):
        TrainingSetup(batch_size=2, channels_last=True, parallel=parallel)
    assert TrainingSetup(batch_size=2, channels_last=True, parallel="ddp(world_size=4)").channels_last


def test_volumes_are_refused():
    with pytest.raises(UserError, match="expected no 3-D convolutions beside channels_last"):
        in_channels_last(nn.Conv3d(2, 2, 3))


def test_a_layer_table_has_no_layout():
    with pytest.raises(UserError, match="channels_last"):
        check_trained_whole(TrainingSetup(batch_size=2, channels_last=True))


def test_only_images_change_their_layout():
    images, tokens, label = torch.zeros(2, 3, 4, 4), torch.zeros(2, 7), "own"
    arranged = images_channels_last((images, tokens, label))
    assert arranged[0].is_contiguous(memory_format=torch.channels_last)
    assert arranged[1] is tokens
    assert arranged[2] is label
