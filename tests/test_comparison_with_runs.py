"""`vramcast snapshot FILE --against -- COMMAND`: a recording beside a run, and runs that are read back."""

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recorded_allocators import RecordedAllocator

from benchmarks.snapshots.rebuilt import JOBS, job_of
from vramcast.cli import main
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.recordings.alignment import Alignment, align, stream_of
from vramcast.virtual_gpu.recordings.files import read_recording
from vramcast.virtual_gpu.recordings.recording import Action, Recording, recording_of

SCRIPT = """
import sys
import torch
from torch import nn

width = int(sys.argv[1])
network = nn.Sequential(nn.Linear(512, width), nn.ReLU(), nn.Linear(width, 512)).cuda()
optimizer = torch.optim.AdamW(network.parameters())
for _ in range(4):
    optimizer.zero_grad()
    network(torch.randn(256, 512, device="cuda")).square().mean().backward()
    optimizer.step()
print("peak", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
"""


def _played(sizes: list[int]) -> Recording:
    recorded = RecordedAllocator()
    for size in sizes:
        block = recorded.malloc(size, frames=[{"filename": "train.py", "line": size % 7, "name": "forward"}])
        assert block is not None
        recorded.free(block)
    return recording_of(recorded.snapshot(), "a test")


def _aligned(left: list[int], right: list[int]) -> Alignment:
    one, other = _played(left), _played(right)
    return align((one, stream_of(one, one.devices[0], "a")), (other, stream_of(other, other.devices[0], "b")))


def _sizes(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.choice([512, 4096, 65536, 5 * MIB]) for _ in range(count)]


def test_equal_streams_agree_in_everything() -> None:
    sizes = _sizes(400, 1)
    result = _aligned(sizes, sizes)
    assert (result.equal, result.recorded, result.missing, result.surplus) == (400, 400, (), ())
    assert result.allocated_error == result.reserved_error == 0


def test_a_part_of_a_longer_run_is_found_with_its_differences() -> None:
    run = _sizes(1000, 2)
    part = run[300:700]
    recorded = [*part[:100], 3 * MIB, *part[100:200], *part[203:]]  # one more, three less
    result = _aligned(recorded, run)
    assert result.first == 300
    assert result.equal == 397
    assert sum(item.count for item in result.missing) == 1
    assert result.missing[0].size_bytes == 3 * MIB
    assert sum(item.count for item in result.surplus) == 3


def test_a_stretch_that_is_missing_does_not_end_the_alignment() -> None:
    run = _sizes(6000, 3)
    result = _aligned(run, [*run[:2000], *run[3500:]])
    assert result.equal == 4500
    assert sum(item.count for item in result.missing) == 1500


def test_unrelated_streams_of_many_events_take_bounded_time() -> None:
    start = time.process_time()
    result = _aligned(_sizes(5_000, 4), [size + 512 for size in _sizes(5_000, 5)])
    assert result.equal < 5_000
    assert time.process_time() - start < 60


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A script, and the snapshot of a run of it."""
    folder = tmp_path_factory.mktemp("runs")
    script, snapshot = folder / "train.py", folder / "memory.pickle"
    script.write_text(SCRIPT)
    words = ["run", "--json", "--snapshot", str(snapshot), "--", sys.executable, str(script), "2048"]
    assert main(words) == 0
    return script, snapshot


def _json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    capsys.readouterr()
    assert main(list(words)) == 0
    return json.loads(capsys.readouterr().out)


def test_our_own_snapshot_gives_the_peak_of_its_run(
    run: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, _ = run
    path = tmp_path / "again.pickle"
    answer = _json(capsys, "run", "--json", "--snapshot", str(path), "--", sys.executable, str(script), "2048")
    (device,) = _json(capsys, "snapshot", str(path), "--json")["devices"]
    assert device["replay"]["agrees"], device["replay"]
    assert device["peak_allocated_bytes"] / MIB == pytest.approx(answer["allocated_mib"], abs=0.05)  # rounded
    assert device["peak_reserved_bytes"] / MIB == answer["reserved_mib"]
    kinds = device["peak"]["by_kind"]
    assert kinds["parameters"] == 4 * (2 * 512 * 2048 + 2048 + 512)
    assert kinds["optimizer"] >= 2 * kinds["parameters"]


def test_a_script_beside_its_own_snapshot_is_equal(run: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    script, snapshot = run
    words = ("snapshot", str(snapshot), "--json", "--against", "--", sys.executable, str(script), "2048")
    result = _json(capsys, *words)
    assert result["equal"] == result["recorded"] > 50
    assert not result["missing"]
    assert not result["surplus"]
    assert result["allocated_error"] == result["reserved_error"] == 0


def test_another_script_differs_by_operator_and_line(
    run: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    script, snapshot = run
    words = ("snapshot", str(snapshot), "--against", "--", sys.executable, str(script), "4096")
    capsys.readouterr()
    assert main(list(words)) == 0
    page = capsys.readouterr().out
    assert "Missing in the run" in page
    assert "addmm" in page
    assert "train.py:" in page


def test_against_needs_a_command(run: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, snapshot = run
    for words in (["--against"], ["--", "python", "train.py"]):
        assert main(["snapshot", str(snapshot), *words]) == 2
        assert "expected --against together with -- COMMAND" in capsys.readouterr().err


def test_a_trace_of_the_profiler_is_compared_with_a_run(
    run: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The memory events that torch.profiler would have written for the run.
    script, snapshot = run
    recording = read_recording(snapshot)
    device = recording.devices[0]
    stream = stream_of(recording, device, "a run")
    events, sizes = [], {}
    for index, event in enumerate(device.events):
        if event.action is Action.ALLOC:
            sizes[event.address] = -(-event.size_bytes // 512) * 512
        if event.action in (Action.ALLOC, Action.FREE_COMPLETED):
            sign = 1 if event.action is Action.ALLOC else -1
            arguments = {"Device Type": 1, "Device Id": 0, "Addr": event.address, "Bytes": sign * sizes[event.address]}
            totals = {"Total Allocated": stream.allocated[index], "Total Reserved": stream.reserved[index]}
            events.append({"name": "[memory]", "ph": "i", "ts": index, "args": {**arguments, **totals}})
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [{"name": "aten::mm", "ph": "X"}, *events]}))
    (page,) = _json(capsys, "snapshot", str(path), "--json")["devices"]
    assert page["peak_allocated_bytes"] == max(stream.allocated)
    assert page["peak_reserved_bytes"] == max(stream.reserved)
    words = ("snapshot", str(path), "--json", "--against", "--", sys.executable, str(script), "2048")
    result = _json(capsys, *words)
    assert result["equal"] == result["recorded"] > 50
    assert result["allocated_error"] == result["reserved_error"] == 0


def test_a_trace_without_memory_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [{"name": "aten::mm"}]}))
    assert main(["snapshot", str(path)]) == 2
    assert "profile_memory=True" in capsys.readouterr().err


def test_a_rebuilt_job_takes_what_a_real_gpu_recorded(
    public_table: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = public_table("snapshots").glob("niuhuangxiaozi_forward_memory_snapshot_150_*")
    job = job_of(path.name)
    assert job is not None
    words = ["snapshot", str(path), "--device", "a100_80gb", "--json", "--against", "--", sys.executable]
    result = _json(capsys, *words, str(JOBS / job[0]), *job[1:])
    assert result["equal"] == result["recorded"] == 785
    assert not result["missing"]
    assert abs(result["allocated_error"]) < 5e-4
    assert result["reserved_error"] == 0


def test_each_rebuilt_job_is_a_script() -> None:
    names = (
        "linyunlinyun_xl_ctx128_full_step_bf16_f68696.json.xz",
        "wedsonlin_medium_512_inference_memory_snapshot_2afd8b.json.xz",
    )
    for name in names:
        job = job_of(name)
        assert job is not None
        assert (JOBS / job[0]).is_file()
        assert "--bf16" in job
    assert job_of("hanfa_benchmark.json.xz") is None
