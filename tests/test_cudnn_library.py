"""Workspaces from an installed cuDNN: the process that loads it, its answers, and profiles that ask it.

A stub for the library tests every call; tests of the real one run where cuDNN 9.8 or later is installed.
"""

import json
import multiprocessing
import random
import signal
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import yaml
from c_libraries import compile_library

from vramcast.cli import main as vramcast
from vramcast.commands.device.device_command import main
from vramcast.dataset_builder.backends.virtual import trace_spec
from vramcast.device.calibration.probes import random_probes
from vramcast.device.profiles import gpu_profiles, load_profile
from vramcast.errors import UserError
from vramcast.jobs.families import make_spec
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.cudnn import library
from vramcast.virtual_gpu.cudnn.child import strides
from vramcast.virtual_gpu.cudnn.layouts import known_workspace_bytes
from vramcast.virtual_gpu.operators.convolutions import convolution_kernels
from vramcast.virtual_gpu.profile import parse_profile
from vramcast.virtual_gpu.replay.simulate import simulate
from vramcast.virtual_gpu.replay.trials import largest_workspace_bytes
from vramcast.virtual_gpu.tracing.trace import ConvolutionCall
from vramcast.virtual_gpu.training.setup import TrainingSetup

SOURCE = Path(__file__).parent / "support" / "cudnn_stub.c"
RELEASE = "9.10.2"
CALL = ConvolutionCall("forward", (2, 3, 8, 8), (6, 3, 3, 3), (2, 6, 6, 6), (1, 1), 1)
X, Y, WEIGHT = 2 * 3 * 8 * 8, 2 * 6 * 6 * 6, 6 * 3 * 3 * 3
SETTINGS = {"name": "own", "title": "A GPU", "total_mib": 16000, "compute_capability": 8.6, "context_mib": 300}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The directory of a compiled stub."""
    folder = compile_library(SOURCE, tmp_path_factory.mktemp("cudnn") / "libcudnn.so.9")
    return folder or pytest.skip("no C compiler to compile the stub with")


def forget():
    while library._started:
        library._started.popitem()[1].close()
    library.workspace_bytes.cache_clear()
    load_profile.cache_clear()


@pytest.fixture
def stub(compiled, monkeypatch):
    monkeypatch.setenv(library.LIBRARY, str(compiled))
    forget()
    yield compiled
    forget()


def asked(call=CALL, capability=8.6, largest=False):
    return library.workspace_bytes(call, capability, RELEASE, largest)


def test_the_first_plan_that_torch_accepts_counts(stub):
    assert asked() == X + 1000 * Y + 1_000_000 * WEIGHT


@pytest.mark.parametrize("direction", ["forward", "data", "weight"])
def test_tensors_have_the_same_places_in_every_direction(stub, direction):
    assert asked(replace(CALL, direction=direction)) == X + 1000 * Y + 1_000_000 * WEIGHT


def test_the_largest_plan_may_be_one_of_the_fallback(stub):
    assert asked(largest=True) == 3 * asked()


def test_a_convolution_of_sequences_gets_a_height_of_one(stub):
    flat = ConvolutionCall("forward", (2, 3, 8), (6, 3, 3), (2, 6, 6), (1,), 1, padding=(2,))
    assert asked(flat) == 2 * 3 * 8 + 1000 * 2 * 6 * 6 + 1_000_000 * 6 * 3 * 3
    request = library._request(flat)
    assert request["x"] == [2, 3, 1, 8]
    assert (request["stride"], request["padding"], request["dilation"]) == ([1, 1], [0, 2], [1, 1])


def test_depthwise_convolutions_run_without_cudnn_unless_channels_come_last(stub):
    depthwise = ConvolutionCall("forward", (2, 4, 8, 8), (4, 1, 3, 3), (2, 4, 6, 6), (1, 1), 4)
    assert asked(depthwise) == 0
    assert asked(replace(depthwise, channels_last=True)) > 0


def test_calls_that_torch_keeps_from_cudnn_take_nothing(stub):
    half = replace(CALL, dtype="bfloat16")
    assert (asked(half, 7.5), asked(replace(CALL, x=(0, 3, 8, 8), y=(0, 6, 6, 6)))) == (0, 0)
    assert asked(half, 8.0) == asked()


def test_threads_share_one_process(stub):
    with ThreadPoolExecutor(8) as pool:
        processes = set(pool.map(lambda _: library.installed_cudnn(), range(16)))
    assert len(processes) == 1


def test_an_interrupt_does_not_end_the_process(stub):
    asked()
    cudnn = library.installed_cudnn()
    cudnn._child.process.send_signal(signal.SIGINT)
    assert asked(replace(CALL, dtype="float16")) == asked()
    assert library.installed_cudnn() is cudnn


@pytest.mark.parametrize(("channels_last", "expected"), [(False, [60, 20, 5, 1]), (True, [60, 1, 15, 3])])
def test_strides_follow_the_layout(channels_last, expected):
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert strides((2, 3, 4, 5), channels_last) == expected
    assert tuple(expected) == torch.empty((2, 3, 4, 5), memory_format=layout).stride()


def test_one_process_answers_all_requests(stub):
    assert library.installed_cudnn() is library.installed_cudnn()
    assert library.installed_cudnn().release == RELEASE


def _ask_in_fork(queue):
    queue.put(asked())


def test_a_fork_starts_a_process_of_its_own(stub):
    """Two processes that share the pipes would read each other's answers."""
    expected = asked()
    library.workspace_bytes.cache_clear()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_ask_in_fork, args=(queue,))
    child.start()
    assert queue.get(timeout=30) == expected
    child.join(30)
    assert asked() == expected


def test_a_gpu_that_cudnn_refuses_is_named(stub):
    with pytest.raises(UserError, match=r"capability 3.5, found .*the GPU is too old: choose a device profile"):
        asked(capability=3.5)
    assert asked() > 0  # the process has not ended


def test_a_crash_of_the_library_is_an_error_and_no_crash(stub):
    with pytest.raises(UserError, match="found that its process ended with code -6"):
        asked(capability=6.6)
    assert asked() == X + 1000 * Y + 1_000_000 * WEIGHT  # a new process answers


def test_another_release_than_the_profiles_is_refused(stub):
    with pytest.raises(UserError, match=r"expected cuDNN 9.8.0, which the device profile names, found 9.10.2: install"):
        library.workspace_bytes(CALL, 8.6, "9.8.0")


def test_a_release_that_needs_a_gpu_is_refused(stub, monkeypatch):
    monkeypatch.setenv("STUB_VERSION", "90100")
    with pytest.raises(UserError, match=r"expected cuDNN 9.8 or later, which needs no GPU, found 9.1.0"):
        asked()


def test_a_file_that_is_no_library_is_refused(tmp_path, monkeypatch):
    (tmp_path / "libcudnn.so.9").write_text("no library")
    monkeypatch.setenv(library.LIBRARY, str(tmp_path))
    forget()
    with pytest.raises(UserError, match=f"expected to load {tmp_path}/libcudnn.so.9, found "):
        library.installed_cudnn()


def test_packages_of_pip_are_found(tmp_path, monkeypatch):
    wheel = tmp_path / "nvidia" / "cudnn" / "lib"
    blas = tmp_path / "nvidia" / "cublas" / "lib"
    for folder, name in ((wheel, "libcudnn.so.9"), (blas, "libcublasLt.so.12")):
        folder.mkdir(parents=True)
        (folder / name).touch()
    monkeypatch.delenv(library.LIBRARY, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert library.find_installation() == library.Installation(wheel / "libcudnn.so.9", (blas / "libcublasLt.so.12",))


def test_a_profile_asks_for_all_convolutions_of_a_job(stub):
    profile = parse_profile({**SETTINGS, "cudnn_release": RELEASE})
    spec = make_spec(
        "cnn",
        {"arch": "uniform", "input_channels": 3, "input_size": 16, "num_classes": 10, "depth": 2, "base_filters": 8},
        TrainingSetup(batch_size=2),
    )
    trace = trace_spec(spec)
    calls = [call for call in trace.calls if isinstance(call, ConvolutionCall)]
    assert {call.padding for call in calls} == {(1, 1)}
    assert all(profile.workspace_bytes(call) == asked(call) for call in calls)
    measurement = simulate(trace, profile, AllocatorOptions())
    assert measurement.notes[1:] == (f"the workspaces of convolutions are those of cuDNN {RELEASE}",)
    assert (measurement.reserved_bytes or 0) > max(asked(call) for call in calls)


def test_trials_take_the_largest_plan(stub):
    profile = parse_profile({**SETTINGS, "cudnn_release": RELEASE})
    assert profile.largest_workspace_bytes(CALL) == 3 * profile.workspace_bytes(CALL)


def test_rules_and_a_release_exclude_each_other():
    with pytest.raises(UserError, match="expected cudnn_release or rules in the device profile own, found both"):
        parse_profile({**SETTINGS, "cudnn_release": RELEASE, "convolution": [{"copies": 1.0}]})


def test_calibrate_writes_a_profile_that_all_commands_accept(stub, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("VRAMCAST_CONFIG", str(tmp_path))
    assert main(["calibrate", "mine", "--from-cudnn", "--start", "rtx_4090"]) == 0
    printed = capsys.readouterr().out
    assert f"NVIDIA GeForce RTX 4090, with workspaces from cuDNN {RELEASE}" in printed
    assert "of 2000 random convolutions" in printed
    written = yaml.safe_load((tmp_path / "device" / "mine.yaml").read_text())
    start = load_profile("rtx_4090")
    assert (written["cudnn_release"], written["total_mib"]) == (RELEASE, start.total_mib)
    profile = load_profile("mine")
    rules = {"convolution": (), "padded_depthwise_channels": None}
    assert profile == replace(start, name="mine", **rules, cudnn_release=RELEASE, calibrated_on=None)
    assert profile.name not in {item.name for item in gpu_profiles()}  # which others need no library
    assert main(["list"]) == 0
    assert f"cuDNN {RELEASE}" in capsys.readouterr().out
    target = f"{Path(__file__).parent / 'compat' / 'plain_networks.py'}:convolutions"
    words = ["classify", target, "--batch-size", "4", "--input", "3,32,32", "--device", "mine"]
    assert vramcast(words) == 0
    assert f"the workspaces of convolutions are those of cuDNN {RELEASE}" in capsys.readouterr().out
    assert main(["calibrate", "mine", "--from-cudnn", "--force"]) == 0  # from the profile itself, which has no rules
    assert "random convolutions" not in capsys.readouterr().out
    assert main(["calibrate", "other", "--from-cudnn", "--start", "a100_40gb"]) == 0
    assert load_profile("other").padded_depthwise_channels is None  # a guess of rules


def test_calibrate_without_cudnn_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("VRAMCAST_CONFIG", str(tmp_path))
    monkeypatch.setenv(library.LIBRARY, str(tmp_path))
    assert main(["calibrate", "mine", "--from-cudnn"]) == 2
    assert "expected --start DEVICE with --from-cudnn, found a new name, mine" in capsys.readouterr().err
    assert main(["calibrate", "mine", "--from-cudnn", "--start", "t4"]) == 2
    assert f"expected cuDNN 9 in {tmp_path}, found none: install nvidia-cudnn-cu12>=9.8" in capsys.readouterr().err
    assert main(["calibrate", "mine", "--from-cudnn", "--from-rows", "rows"]) == 2
    assert (
        "expected one of --from-rows, --from-device, --from-cudnn and --from-snapshot, found more"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("dtype", "layout"), [(torch.float32, torch.contiguous_format), (torch.bfloat16, torch.channels_last)]
)
def test_a_trace_records_type_layout_and_window(dtype, layout):
    class Recorder:
        """Takes the place of a tracer."""

        def __init__(self):
            self.calls = []
            self.workspace = self.calls.append

        def see(self, tensor):
            return tensor

    recorder = Recorder()
    x = torch.empty((2, 4, 9, 9), device="meta", dtype=dtype, memory_format=layout)
    weight = torch.empty((8, 4, 3, 3), device="meta", dtype=dtype, memory_format=layout)
    kernel = convolution_kernels()[torch.ops.aten.convolution.default]
    kernel(recorder, (x, weight, None, [2, 2], [2], [2, 1], False, [0], 1), {})
    expected = replace(
        ConvolutionCall("forward", (2, 4, 9, 9), (8, 4, 3, 3), (2, 8, 5, 6), (2, 2), 1, (2, 2), (2, 1)),
        dtype=str(dtype).removeprefix("torch."),
        channels_last=layout == torch.channels_last,
    )
    assert recorder.calls == [expected]
    assert expected.element_bytes == dtype.itemsize


@pytest.fixture
def real():
    forget()
    try:
        yield library.installed_cudnn()
    except UserError as error:
        pytest.skip(str(error))
    finally:
        forget()


def test_cudnn_itself_answers_for_every_architecture(real):
    call = ConvolutionCall("forward", (32, 64, 56, 56), (64, 64, 3, 3), (32, 64, 56, 56), (1, 1), 1, (1, 1), (1, 1))
    copies = 4 * (2 * 32 * 64 * 56 * 56 + 64 * 64 * 9)
    for capability in (7.5, 8.0, 8.6, 8.9, 9.0):
        for direction in ("forward", "data", "weight"):
            item = replace(call, direction=direction)
            first = real.workspace_bytes(item, capability)
            assert 0 <= first <= real.workspace_bytes(item, capability, largest=True)
            assert first < 2 * copies


def test_cudnn_itself_copies_to_nhwc_for_tensor_cores(real):
    """An aligned forward pass on consumer GPUs copies input and weight and writes its output in place."""
    call = ConvolutionCall("forward", (32, 64, 56, 56), (64, 64, 3, 3), (32, 64, 56, 56), (1, 1), 1, (1, 1), (1, 1))
    copies = 4 * (32 * 64 * 56 * 56 + 64 * 64 * 9)
    assert copies <= real.workspace_bytes(call, 8.6) < copies + 512
    assert real.workspace_bytes(replace(call, channels_last=True, dtype="bfloat16"), 8.6) < copies / 4


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_cudnn_itself_follows_our_principles_of_layouts(real, dtype, channels_last):
    """Calls that rules do not describe take as much as `layouts.py` says, but for a few."""
    source = random.Random(1)
    equal = compared = 0
    for probe in random_probes(300, source):
        call = replace(probe.call, dtype=dtype, channels_last=channels_last)
        for capability in (8.0, 8.9, 9.0):
            known = known_workspace_bytes(call, capability, 96)
            if known is None or call.direction == "weight" or max(call.x[1], call.y[1]) < 8:
                continue
            compared += 1
            equal += abs(known - real.workspace_bytes(call, capability)) <= max(2**18, known // 20)
    if dtype == "float32" and not channels_last:
        assert compared == 0
    else:
        assert equal > 0.6 * compared > 50  # many of these have odd channels


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_cudnn_itself_tries_as_much_in_channels_last(real, dtype):
    ratios = {True: [], False: []}
    for channels, side, kernel, depthwise in product((32, 128), (14, 56), (1, 3, 7), (True, False)):
        image, weight = (32, channels, side, side), (channels, 1 if depthwise else channels, kernel, kernel)
        for direction in ("forward", "data", "weight"):
            groups, padding = channels if depthwise else 1, (kernel // 2,) * 2
            call = ConvolutionCall(direction, image, weight, image, (1, 1), groups, padding, (1, 1), dtype, True)
            largest = real.workspace_bytes(call, 8.0, largest=True)
            ratios[depthwise].append(largest / largest_workspace_bytes(call))
    for found in ratios.values():
        assert 0.5 < statistics.median(found) < 1.5


_VARIED = """
import json, sys
from pathlib import Path
from vramcast.virtual_gpu.cudnn import child
cudnn = child.Cudnn(Path(sys.argv[1]), [Path(item) for item in sys.argv[2:]])
requests = json.load(sys.stdin)

def workspaces(**members):
    cudnn._devices.clear()
    child._DEVICE.update(members)
    return [child.answer(cudnn, request) for request in requests]

usual = dict(child._DEVICE)
expected = workspaces()
numbers = [name for name, value in usual.items() if isinstance(value, int) and name != "warpSize"]
differing = [name for name in numbers if workspaces(**{**usual, name: round(usual[name] * 0.7) or 1}) != expected]
print(json.dumps([differing, numbers, expected]))
"""


def test_cudnn_itself_looks_at_the_compute_capability_alone(real):
    """One profile serves all GPUs of a generation."""
    source = random.Random(0)
    calls = [probe.call for probe in random_probes(60, source) if not probe.call.is_depthwise]
    requests = [
        {**library._request(call), "capability": capability, "largest": False}
        for call in calls
        for capability in (8.0, 8.6)
    ]
    found = library.find_installation()
    words = [sys.executable, "-c", _VARIED, found.library, *found.needed]
    result = subprocess.run(words, input=json.dumps(requests), text=True, capture_output=True, check=True)
    differing, numbers, answers = json.loads(result.stdout.splitlines()[-1])
    assert differing == []
    assert len(numbers) > 15
    assert answers[::2] != answers[1::2]


def test_cudnn_itself_refuses_a_convolution_that_cannot_be(real):
    wrong = ConvolutionCall("forward", (32, 64, 56, 56), (64, 64, 3, 3), (32, 64, 50, 56), (1, 1), 1, (1, 1), (1, 1))
    with pytest.raises(UserError, match="expected an execution plan of cuDNN"):
        real.workspace_bytes(wrong, 8.6)
