"""A recording of a script beside a run of it on the virtual GPU."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from vramcast.errors import UserError
from vramcast.simulation.scripts.client import RunOptions, run_script
from vramcast.simulation.scripts.command_line import ScriptCommand
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.recordings.alignment import Alignment, AllocationStream, align, stream_of
from vramcast.virtual_gpu.recordings.files import read_recording, read_values
from vramcast.virtual_gpu.recordings.profiler_traces import WITHOUT_STACKS, is_profiler_trace, profiled_memory
from vramcast.virtual_gpu.recordings.recording import Recording, recording_of

_ROOM_MIB = 2**22
"""A recorded job fitted, so the virtual GPU must not run out of memory; 4 TiB are within the addresses of a GPU."""
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def compare_with_run(
    path: Path, command: ScriptCommand, profile: DeviceProfile, steps: int, timeout_seconds: float
) -> Alignment:
    """Run a script on the virtual GPU, with the recorded settings of the allocator, and align both streams."""
    recording, stream = _recorded(path)
    with tempfile.TemporaryDirectory(prefix="vramcast-snapshot-") as folder, _settings_of(recording):
        written = Path(folder) / "simulated.pickle"
        options = RunOptions(steps=steps, timeout_seconds=timeout_seconds, snapshot=written)
        report = run_script(command, replace(profile, total_mib=_ROOM_MIB), (), options)
        if not written.exists():
            raise UserError(
                f"expected a script that runs on the virtual GPU, found: {report.failure or report.ending}; try it "
                "with vramcast run"
            )
        simulated = read_recording(written)
    if not simulated.devices or not simulated.devices[0].events:
        raise UserError(
            "expected a script that uses the GPU, found that nothing was allocated: check that it picks cuda"
        )
    return align((recording, stream), (simulated, stream_of(simulated, simulated.devices[0], "the run")))


def _recorded(path: Path) -> tuple[Recording, AllocationStream]:
    """Return the allocations of the one GPU in a snapshot or in a trace of torch.profiler."""
    values = read_values(path)
    if is_profiler_trace(values):
        profiled = profiled_memory(values, path.name)
        _check_one(len(profiled), path.name)
        return WITHOUT_STACKS, profiled[0].stream
    recording = recording_of(values, path.name)
    devices = [device for device in recording.devices if device.events]
    _check_one(len(devices), path.name)
    return recording, stream_of(recording, devices[0], path.name)


def _check_one(devices: int, name: str) -> None:
    if devices != 1:
        raise UserError(
            f"expected the history of one GPU in {name}, found {devices}: record one rank with "
            "torch.cuda.memory._record_memory_history()"
        )


@contextmanager
def _settings_of(recording: Recording) -> Iterator[None]:
    """Let the script run with the recorded settings of the allocator, unless the user has set others."""
    text = recording.settings.get("PYTORCH_ALLOC_CONF") or recording.settings.get("PYTORCH_CUDA_ALLOC_CONF")
    if not text and recording.options.expandable_segments:
        text = "expandable_segments:True"
    if not text or any(os.environ.get(variable) for variable in _SETTINGS):
        yield
        return
    os.environ[_SETTINGS[1]] = text
    try:
        yield
    finally:
        del os.environ[_SETTINGS[1]]
