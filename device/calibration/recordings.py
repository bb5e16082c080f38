"""Constants of a device profile from memory snapshots: workspaces of cuBLAS and cublasLt, and the context.

A snapshot has no context. An allocation that failed tells the free memory of the device; the rest, without the
segments of the process, belongs to its context, the driver and other processes. The least of several is kept, since
other processes can only add to it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vramcast.errors import UserError
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.recordings.agreement import agreement
from vramcast.virtual_gpu.recordings.recording import Action, DeviceRecording, Recording, Stack
from vramcast.virtual_gpu.recordings.rewinding import reserved_over_time

_CUBLAS = ("at::cuda::getCurrentCUDABlasHandle", "at::cuda::getNewWorkspace", "at::cuda::getCUDABlasWorkspace")
_CUBLASLT = ("at::cuda::getCUDABlasLtWorkspace", "at::cuda::blas::gemm_and_bias", "at::cuda::blas::scaled_gemm")
_INNER_FRAMES = 16
"""Frames that may lie between the allocator and the function that asks for a workspace."""


@dataclass
class Evidence:
    """The constants of a device that recordings show."""

    recordings: int = 0
    cublas: Counter[int] = field(default_factory=Counter)
    """Sizes of workspaces, with the number of allocations."""
    cublaslt: Counter[int] = field(default_factory=Counter)
    outside_bytes: list[int] = field(default_factory=list)
    """Memory outside of the allocator at each failure."""
    allocations: int = 0
    equal_allocations: int = 0
    """Allocations whose address, and so its rounding, the simulated allocator gives."""
    releases: int = 0
    freed: int = 0
    equal_freed: int = 0
    """Segments that were returned."""


def evidence_of(recordings: Sequence[tuple[str, Recording]], total_bytes: int) -> Evidence:
    """Return what recordings of one kind of GPU say."""
    evidence = Evidence(recordings=len(recordings))
    for name, recording in recordings:
        for device in recording.devices:
            _add_workspaces(evidence, recording, device)
            _add_failures(evidence, device, total_bytes)
            replayed = agreement(device, recording.options, name)
            evidence.allocations += replayed.addresses.recorded
            evidence.equal_allocations += replayed.addresses.equal
            evidence.releases += replayed.releases
            evidence.freed += replayed.segments_freed.recorded
            evidence.equal_freed += replayed.segments_freed.equal
    return evidence


def _add_workspaces(evidence: Evidence, recording: Recording, device: DeviceRecording) -> None:
    for event in device.events:
        if event.action is Action.ALLOC and event.stack >= 0:
            library = _library(recording.stacks[event.stack])
            if library:
                getattr(evidence, library)[event.size_bytes] += 1


def _library(stack: Stack) -> str | None:
    """Return the library that a block is the workspace of, by the innermost frame that names one."""
    for frame in stack[:_INNER_FRAMES]:
        if frame.function.startswith("at::_ops::"):
            return None
        if frame.function.startswith(_CUBLAS):
            return "cublas"
        if any(name in frame.function for name in _CUBLASLT):
            return "cublaslt"
    return None


def _add_failures(evidence: Evidence, device: DeviceRecording, total_bytes: int) -> None:
    reserved = reserved_over_time(device)
    for index, event in enumerate(device.events):
        if event.action is Action.OOM:
            outside = total_bytes - reserved[index] - event.address
            if outside < 0:
                raise UserError(
                    f"expected a failure on a GPU of {total_bytes // MIB:,} MiB, found more memory in the recording: "
                    "name the GPU with --start"
                )
            evidence.outside_bytes.append(outside)


def calibrated(start: DeviceProfile, evidence: Evidence) -> tuple[DeviceProfile, list[str]]:
    """Return a profile with the recorded constants, and a line of evidence for each."""
    values: dict[str, Any] = {}
    lines = []
    for library, sizes in (("cublas", evidence.cublas), ("cublaslt", evidence.cublaslt)):
        if sizes:
            (size, count), *others = sizes.most_common()
            values[f"{library}_workspace_bytes"] = size
            rest = f"; also {', '.join(f'{item:,}' for item, _ in others)}" if others else ""
            lines.append(f"{library} workspace: {size:,} bytes in {count} allocations{rest}")
    if evidence.outside_bytes:
        least = min(evidence.outside_bytes)
        context = max(-(-least // MIB) - start.driver_mib - start.other_mib, 0)
        values["context_mib"] = context
        lines.append(
            f"context: at most {context} MiB, from the free memory at {len(evidence.outside_bytes)} failed "
            "allocations; other processes may be part of it"
        )
    lines.append(f"addresses and rounding: {evidence.equal_allocations:,} of {evidence.allocations:,} as simulated")
    segments = f"{evidence.equal_freed:,} of {evidence.freed:,} segments as simulated"
    lines.append(f"releases of the cache: {evidence.releases}, {segments}")
    return replace(start, **values), lines
