"""The gateway to NVML: here alone pynvml is imported, and its handles, structures and error codes end here.

What `nvidia-smi` tells a person (`--query-gpu=uuid,name,memory.used`, `--query-compute-apps=pid,used_memory`) is told
here as typed values. What a card does not tell is None.
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
    """NVML cannot say what was asked for. It concerns every spec alike, so it ends a build."""


class NoDriverError(NvmlError):
    """There is no NVIDIA driver on this machine, or it does not run."""


class GpuLostError(NvmlError):
    """A GPU that was there has fallen off the bus, or wants a reset."""


@dataclass(frozen=True)
class Gpu:
    """What one process can be given: a whole card, or an instance of a card in MIG mode."""

    uuid: str
    """'GPU-...' or 'MIG-...': the only name that is the same for NVML, CUDA and every process."""
    name: str
    index: int
    """Of the card, in the order of nvidia-smi; CUDA's own order may be another."""
    total_bytes: int
    card_uuid: str
    """Of the card that an instance belongs to; of itself for a whole card."""

    @property
    def is_instance(self) -> bool:
        """Whether it is a part of a card in MIG mode."""
        return self.uuid != self.card_uuid


@dataclass(frozen=True)
class Memory:
    """Of a GPU, at one moment."""

    total_bytes: int
    used_bytes: int
    """Held by processes; with a driver before 510 also what the driver reserves for itself."""
    reserved_bytes: int | None
    """Kept by the driver, None where it does not tell this from what is used."""


@dataclass(frozen=True)
class GpuProcess:
    """A process with memory on a GPU."""

    pid: int
    """In the name space of the host: in a container it is another than the process's own."""
    used_bytes: int | None
    """None where the driver does not tell (WSL, Windows, some vGPUs)."""


@contextmanager
def open_nvml() -> Iterator["Nvml"]:
    """NVML for the time of a block."""
    with _explained():
        pynvml.nvmlInit()
    try:
        yield Nvml()
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


class Nvml:
    """What can be asked. Made by `open_nvml`, and useless after its block."""

    def __init__(self) -> None:
        self._handles: dict[str, Any] = {}
        self._memory_version: int | None = pynvml.nvmlMemory_v2
        self.lost: list[str] = []
        """Cards that were found lost while they were listed, in words."""

    def versions(self) -> dict[str, str]:
        """Of the driver, and of the CUDA that it supports (`nvidia-smi` prints both in its first line)."""
        with _explained():
            cuda = pynvml.nvmlSystemGetCudaDriverVersion()
            return {"driver": pynvml.nvmlSystemGetDriverVersion(), "driver_cuda": f"{cuda // 1000}.{cuda % 1000 // 10}"}

    def gpus(self) -> list[Gpu]:
        """All that processes can be given, in the order of `nvidia-smi -L`; lost cards are left out and noted."""
        with _explained():
            count = pynvml.nvmlDeviceGetCount()
        found: list[Gpu] = []
        self.lost = []
        for index in range(count):
            try:
                found += self._of_card(index)
            except GpuLostError as error:
                self.lost.append(f"card {index}: {error}")
        return found

    def _of_card(self, index: int) -> list[Gpu]:
        with _explained(f"card {index}"):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid = pynvml.nvmlDeviceGetUUID(handle)
            instances = self._instances(handle)
            if instances is None:
                return [self._gpu(handle, uuid, index, uuid)]
            return [self._gpu(item, pynvml.nvmlDeviceGetUUID(item), index, uuid) for item in instances]

    def _gpu(self, handle: Any, uuid: str, index: int, card_uuid: str) -> Gpu:
        self._handles[uuid] = handle
        name, total_bytes = pynvml.nvmlDeviceGetName(handle), self._memory(handle).total_bytes
        return Gpu(uuid, name, index, total_bytes, card_uuid)

    def _instances(self, card: Any) -> list[Any] | None:
        """The instances of a card in MIG mode, None for one that is not."""
        mode = _unless_unsupported(lambda: pynvml.nvmlDeviceGetMigMode(card))
        if mode is None or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return None
        found = []
        for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(card)):
            with suppress(pynvml.NVMLError_NotFound):  # places for instances that nobody made
                found.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(card, index))
        return found

    def memory(self, gpu: Gpu) -> Memory:
        """What the GPU has and holds now."""
        with _explained(gpu.uuid):
            return self._memory(self._handle(gpu))

    def _handle(self, gpu: Gpu) -> Any:
        if gpu.uuid not in self._handles:
            self._handles[gpu.uuid] = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        return self._handles[gpu.uuid]

    def _memory(self, handle: Any) -> Memory:
        if self._memory_version is not None:
            info = _unless_unsupported(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle, self._memory_version))
            if info is not None:
                return Memory(info.total, info.used, info.reserved)
            self._memory_version = None  # an old driver: asked once, not at every sample
        info = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return Memory(info.total, info.used, None)

    def processes(self, gpu: Gpu) -> list[GpuProcess] | None:
        """Who has memory on the GPU, computing or drawing; None where the driver does not tell."""
        with _explained(gpu.uuid):
            handle = self._handle(gpu)
            lists = [
                _unless_unsupported(lambda: _whole(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)),
                _unless_unsupported(lambda: _whole(pynvml.nvmlDeviceGetGraphicsRunningProcesses, handle)),
            ]
        if lists[0] is None:
            return None
        used: dict[int, int | None] = {}
        for item in (item for part in lists if part for item in part):
            # one that computes and draws is in both lists, with one figure
            used[item.pid] = item.usedGpuMemory if used.get(item.pid) is None else used[item.pid]
        return [GpuProcess(pid, used_bytes) for pid, used_bytes in sorted(used.items())]


def _whole(ask: Callable[[Any], list[Any]], handle: Any) -> list[Any]:
    """A list that pynvml asks for in two calls; in between it may outgrow the room that was made for it."""
    for _ in range(3):
        with suppress(pynvml.NVMLError_InsufficientSize):
            return ask(handle)
    return ask(handle)


def _unless_unsupported(ask: Callable[[], T]) -> T | None:
    """The answer, or None where this card, driver or user cannot have it."""
    try:
        return ask()
    except (
        pynvml.NVMLError_NotSupported,
        pynvml.NVMLError_FunctionNotFound,
        pynvml.NVMLError_NoPermission,
        pynvml.NVMLError_ArgumentVersionMismatch,
    ):
        return None


_NO_DRIVER = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "no libnvidia-ml.so.1 on this machine: install the driver",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "its library but no running driver: load it (nvidia-smi tells why it is not)",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "a library of another version than the running driver: reboot",
    pynvml.NVML_ERROR_NO_PERMISSION: "no permission to open the devices: see /dev/nvidia* and the user's groups",
}
_LOST = {
    pynvml.NVML_ERROR_GPU_IS_LOST: "that it is lost: look for Xid in dmesg, then reset it (nvidia-smi -r) or reboot",
    pynvml.NVML_ERROR_RESET_REQUIRED: "that it wants a reset: end its processes, then nvidia-smi -r",
}


@contextmanager
def _explained(what: str = "an NVIDIA driver") -> Iterator[None]:
    """Turn NVML's error codes into sentences that a person can act on."""
    try:
        yield
    except pynvml.NVMLError as error:
        if error.value in _NO_DRIVER:
            raise NoDriverError(
                f"expected an NVIDIA driver for a GPU, found {_NO_DRIVER[error.value]}, or {NO_GPU_NEEDED}"
            ) from error
        if error.value in _LOST:
            raise GpuLostError(f"expected {what} to answer, found {_LOST[error.value]}") from error
        raise NvmlError(f"expected {what} to answer, found NVML's error '{error}': see nvidia-smi -q") from error
