"""`vramcast device calibrate NAME --from-snapshot FILE...`: constants of a profile from recordings."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from vramcast.cli import main
from vramcast.device.profiles import load_profile
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.profile import parse_profile
from vramcast.virtual_gpu.recordings.recorder import RecordedAllocator


def _frames(*functions: str) -> list[dict[str, Any]]:
    return [{"filename": "??", "line": 0, "name": name} for name in functions]


CUBLAS = _frames("at::cuda::getNewWorkspace()", "at::cuda::getCurrentCUDABlasHandle()", "at::_ops::mm::call(...)")
CUBLASLT = _frames("at::cuda::getCUDABlasLtWorkspace()", "at::_ops::addmm::call(...)")


def _recorded(path: Path, free_mib: int, context_mib: int) -> None:
    """Write the snapshot of a job that runs out of memory on an H200 with a context."""
    total = 143_771 * MIB
    recorded = RecordedAllocator(capacity_bytes=total - context_mib * MIB)
    recorded.malloc(12_345_344, frames=CUBLAS)
    recorded.malloc(3 * MIB, frames=CUBLASLT)
    recorded.malloc(total - context_mib * MIB - (free_mib + 40) * MIB)
    assert recorded.malloc((free_mib + 500) * MIB) is None
    path.write_bytes(pickle.dumps(recorded.snapshot()))


def test_workspaces_and_the_context_come_from_recordings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for index, context_mib in enumerate((1300, 1200)):
        paths.append(tmp_path / f"{index}.pickle")
        _recorded(paths[-1], 100 + index, context_mib)
    out = tmp_path / "mine.yaml"
    words = ["device", "calibrate", "mine", "--start", "h200", "-o", str(out), "--from-snapshot", *map(str, paths)]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "cublas workspace: 12,345,344 bytes in 2 allocations" in text
    assert "addresses and rounding: 6 of 6 as simulated" in text
    profile = parse_profile(yaml.safe_load(out.read_text()))
    assert profile.cublas_workspace_bytes == 12_345_344
    assert profile.cublaslt_workspace_bytes == 3 * MIB
    # The least of both: other processes can only add to it. The recorded capacity has no driver of its own.
    assert profile.context_mib == 1200 - profile.driver_mib
    assert "failed allocations" in out.read_text()


def test_a_recording_of_a_larger_gpu_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "large.pickle"
    _recorded(path, 100, 1200)
    words = ["device", "calibrate", "mine", "--start", "rtx_4090", "-o", str(tmp_path / "x.yaml")]
    assert main([*words, "--from-snapshot", str(path)]) == 2
    assert "expected a failure on a GPU of 24,564 MiB" in capsys.readouterr().err


def test_public_recordings_have_the_workspaces_of_the_profiles(
    tmp_path: Path, public_table: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = public_table("snapshots")
    files = [str(path) for name in ("niuhuangxiaozi_forward_memory", "hanfa") for path in folder.glob(f"{name}*")]
    out = tmp_path / "mine.yaml"
    words = ["device", "calibrate", "mine", "--start", "a100_80gb", "-o", str(out), "--from-snapshot", *files]
    assert main(words) == 0
    assert "cublas workspace: 8,519,680" in capsys.readouterr().out
    profile, start = parse_profile(yaml.safe_load(out.read_text())), load_profile("a100_80gb")
    assert profile.cublas_workspace_bytes == start.cublas_workspace_bytes
    assert profile.cublaslt_workspace_bytes == start.cublaslt_workspace_bytes
    assert profile.context_mib == start.context_mib
