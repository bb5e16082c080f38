"""The gateway to NVML: the only module that imports pynvml and uses its handles, structures and error codes.

It returns what `nvidia-smi --query-gpu=uuid,name,memory.used` and `--query-compute-apps=pid,used_memory` print.
A value that the driver does not report is None.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import pynvml

from vramcast.errors import UserError

T = TypeVar("T")

NO_GPU_NEEDED = "use backend=virtual, which needs no GPU"


class NvmlError(UserError):
    """A query to NVML failed. This affects every spec, so it ends a build."""


class NoDriverError(NvmlError):
    """This machine has no running NVIDIA driver."""


class GpuLostError(NvmlError):
    """A GPU has fallen off the bus, or needs a reset."""


@dataclass(frozen=True)
class Gpu:
    """A device that a process can use: a whole GPU, or an instance of a GPU in MIG mode."""

    uuid: str
    """'GPU-...' or 'MIG-...': the only name that NVML, CUDA and all processes share."""
    name: str
    index: int
    """Index of the whole GPU in the order of nvidia-smi; CUDA's order may differ."""
    total_bytes: int
    board_uuid: str
    """UUID of the whole GPU that an instance belongs to; its own for a whole GPU."""

    @property
    def is_instance(self) -> bool:
        """True for an instance of a GPU in MIG mode."""
        return self.uuid != self.board_uuid


@dataclass(frozen=True)
class GpuMemory:
    """The memory of a GPU at one moment."""

    total_bytes: int
    used_bytes: int
    """Used by processes; with drivers before 510, this includes what the driver reserves for itself."""
    reserved_bytes: int | None
    """Reserved by the driver; None where it is part of `used_bytes`."""


@dataclass(frozen=True)
class GpuProcess:
    """A process with memory on a GPU."""

    pid: int
    """Process id on the host, which differs from the one inside a container."""
    used_bytes: int | None
    """None where the driver does not report it (WSL, Windows, some vGPUs)."""


@contextmanager
def open_nvml() -> Iterator["Nvml"]:
    """Initialize NVML and shut it down after the block."""
    with _explained():
        pynvml.nvmlInit()
    try:
        yield Nvml()
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


class Nvml:
    """Queries to NVML. Created by `open_nvml`, and valid inside its block."""

    def __init__(self) -> None:
        self._handles: dict[str, Any] = {}
        self._memory_version: int | None = pynvml.nvmlMemory_v2
        self.lost: list[str] = []
        """Errors of lost GPUs that `gpus` left out."""

    def versions(self) -> dict[str, str]:
        """Return the version of the driver and of the CUDA that it supports, as in the first line of `nvidia-smi`."""
        with _explained():
            cuda = pynvml.nvmlSystemGetCudaDriverVersion()
            return {"driver": pynvml.nvmlSystemGetDriverVersion(), "driver_cuda": f"{cuda // 1000}.{cuda % 1000 // 10}"}

    def gpus(self) -> list[Gpu]:
        """Return all GPUs and MIG instances in the order of `nvidia-smi -L`; lost ones are noted in `lost` instead."""
        with _explained():
            count = pynvml.nvmlDeviceGetCount()
        gpus: list[Gpu] = []
        self.lost = []
        for index in range(count):
            try:
                gpus += self._gpus_at(index)
            except GpuLostError as error:
                self.lost.append(f"GPU {index}: {error}")
        return gpus

    def _gpus_at(self, index: int) -> list[Gpu]:
        with _explained(f"GPU {index}"):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid = pynvml.nvmlDeviceGetUUID(handle)
            instances = self._instances(handle)
            if instances is None:
                return [self._gpu(handle, uuid, index, uuid)]
            return [self._gpu(item, pynvml.nvmlDeviceGetUUID(item), index, uuid) for item in instances]

    def _gpu(self, handle: Any, uuid: str, index: int, board_uuid: str) -> Gpu:
        self._handles[uuid] = handle
        name, total_bytes = pynvml.nvmlDeviceGetName(handle), self._memory(handle).total_bytes
        return Gpu(uuid, name, index, total_bytes, board_uuid)

    def _instances(self, handle: Any) -> list[Any] | None:
        """Return the instances of a GPU in MIG mode, None for a GPU in another mode."""
        mode = _unless_unsupported(lambda: pynvml.nvmlDeviceGetMigMode(handle))
        if mode is None or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return None
        instances = []
        for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with suppress(pynvml.NVMLError_NotFound):  # a slot without an instance
                instances.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
        return instances

    def memory(self, gpu: Gpu) -> GpuMemory:
        """Return the memory of a GPU now."""
        with _explained(gpu.uuid):
            return self._memory(self._handle(gpu))

    def _handle(self, gpu: Gpu) -> Any:
        if gpu.uuid not in self._handles:
            self._handles[gpu.uuid] = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        return self._handles[gpu.uuid]

    def _memory(self, handle: Any) -> GpuMemory:
        if self._memory_version is not None:
            info = _unless_unsupported(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle, self._memory_version))
            if info is not None:
                return GpuMemory(info.total, info.used, info.reserved)
            self._memory_version = None  # an old driver: do not try again at every sample
        info = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return GpuMemory(info.total, info.used, None)

    def processes(self, gpu: Gpu) -> list[GpuProcess] | None:
        """Return the compute and graphics processes on a GPU; None where the driver does not report them."""
        with _explained(gpu.uuid):
            handle = self._handle(gpu)
            lists = [
                _unless_unsupported(lambda: _complete(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)),
                _unless_unsupported(lambda: _complete(pynvml.nvmlDeviceGetGraphicsRunningProcesses, handle)),
            ]
        if lists[0] is None:
            return None
        used: dict[int, int | None] = {}
        for item in (item for part in lists if part for item in part):
            # a compute process with graphics is in both lists with the same value
            used[item.pid] = item.usedGpuMemory if used.get(item.pid) is None else used[item.pid]
        return [GpuProcess(pid, used_bytes) for pid, used_bytes in sorted(used.items())]


def _complete(query: Callable[[Any], list[Any]], handle: Any) -> list[Any]:
    """Repeat a query that pynvml makes in two calls, because the list may grow in between."""
    for _ in range(3):
        with suppress(pynvml.NVMLError_InsufficientSize):
            return query(handle)
    return query(handle)


def _unless_unsupported(query: Callable[[], T]) -> T | None:
    """Return the result, or None where this GPU, driver or user does not support the query."""
    try:
        return query()
    except (
        pynvml.NVMLError_NotSupported,
        pynvml.NVMLError_FunctionNotFound,
        pynvml.NVMLError_NoPermission,
        pynvml.NVMLError_ArgumentVersionMismatch,
    ):
        return None


_NO_DRIVER = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "no libnvidia-ml.so.1 on this machine: install the driver",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "its library but no running driver: load it (nvidia-smi says what failed)",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "a library of another version than the running driver: reboot",
    pynvml.NVML_ERROR_NO_PERMISSION: "no permission to open the devices: see /dev/nvidia* and the user's groups",
}
_LOST = {
    pynvml.NVML_ERROR_GPU_IS_LOST: "that it is lost: look for Xid in dmesg, then reset it (nvidia-smi -r) or reboot",
    pynvml.NVML_ERROR_RESET_REQUIRED: "that it needs a reset: end its processes, then nvidia-smi -r",
}


@contextmanager
def _explained(what: str = "an NVIDIA driver") -> Iterator[None]:
    """Turn NVML's error codes into errors that a user can act on."""
    try:
        yield
    except pynvml.NVMLError as error:
        if error.value in _NO_DRIVER:
            raise NoDriverError(
                f"expected an NVIDIA driver for a GPU, found {_NO_DRIVER[error.value]}, or {NO_GPU_NEEDED}"
            ) from error
        if error.value in _LOST:
            raise GpuLostError(f"expected {what} to respond, found {_LOST[error.value]}") from error
        raise NvmlError(f"expected {what} to respond, found NVML's error '{error}': see nvidia-smi -q") from error
