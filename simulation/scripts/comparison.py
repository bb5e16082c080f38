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
from vramcast.virtual_gpu.recordings.alignment import Alignment, align, stream_of
from vramcast.virtual_gpu.recordings.files import read_recording
from vramcast.virtual_gpu.recordings.recording import Recording

_ROOM_MIB = 2**22
"""A recorded job fitted, so the virtual GPU must not run out of memory; 4 TiB are within the addresses of a GPU."""
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def compare_with_run(
    recording: Recording,
    name: str,
    command: ScriptCommand,
    profile: DeviceProfile,
    steps: int,
    timeout_seconds: float,
) -> Alignment:
    """Run a script on the virtual GPU, with the recorded settings of the allocator, and align both streams."""
    recorded = [device for device in recording.devices if device.events]
    if len(recorded) != 1:
        raise UserError(
            f"expected the history of one GPU in {name}, found {len(recorded)}: record one rank with "
            "torch.cuda.memory._record_memory_history()"
        )
    with tempfile.TemporaryDirectory(prefix="vramcast-snapshot-") as folder, _settings_of(recording):
        path = Path(folder) / "simulated.pickle"
        options = RunOptions(steps=steps, timeout_seconds=timeout_seconds, snapshot=path)
        report = run_script(command, replace(profile, total_mib=_ROOM_MIB), (), options)
        if not path.exists():
            raise UserError(
                f"expected a script that runs on the virtual GPU, found: {report.failure or report.ending}; try it "
                "with vramcast run"
            )
        simulated = read_recording(path)
    if not simulated.devices or not simulated.devices[0].events:
        raise UserError(
            "expected a script that uses the GPU, found that nothing was allocated: check that it picks cuda"
        )
    streams = stream_of(recording, recorded[0], name), stream_of(simulated, simulated.devices[0], "the run")
    return align((recording, streams[0]), (simulated, streams[1]))


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
