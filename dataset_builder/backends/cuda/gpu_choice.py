"""Choose the GPU for a measurement: visible to this process, allowed by the settings, and free of other processes."""

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from vramcast.device.nvml import NO_GPU_NEEDED, Gpu, GpuProcess, NoDriverError, Nvml
from vramcast.errors import UserError
from vramcast.virtual_gpu.allocator.sizes import MIB

AUTO = "auto"
IDLE_BYTES = 128 * 2**20
"""A GPU with no listed process counts as free up to this use."""
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class OtherProcesses:
    """The processes on a GPU before a child is started there."""

    processes: tuple[GpuProcess, ...]
    held_bytes: int | None
    """Sum of their memory; None where the driver does not report it."""

    @property
    def none(self) -> bool:
        """True if the GPU is free."""
        return not self.processes and not self.held_bytes

    def __str__(self) -> str:
        listed = [
            f"pid {item.pid}" + ("" if item.used_bytes is None else f" with {item.used_bytes // MIB} MiB")
            for item in self.processes
        ]
        return ", ".join(listed) or f"{(self.held_bytes or 0) // MIB} MiB of a process that NVML does not list"


def other_processes_on(nvml: Nvml, gpu: Gpu) -> OtherProcesses:
    """Return the processes on a GPU. Used memory without a listed process (as in a container) counts as one."""
    processes, memory = nvml.processes(gpu), nvml.memory(gpu)
    if processes:
        amounts = [item.used_bytes for item in processes]
        return OtherProcesses(tuple(processes), None if None in amounts else sum(amount or 0 for amount in amounts))
    unlisted = memory.reserved_bytes is not None and memory.used_bytes > IDLE_BYTES
    return OtherProcesses((), memory.used_bytes if unlisted else 0 if processes is not None else None)


def visible_gpus(nvml: Nvml, environment: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs that CUDA shows to a process with this environment, in CUDA's order.

    CUDA_VISIBLE_DEVICES holds indices or beginnings of UUIDs. CUDA ignores what follows the first entry that matches no
    GPU (CUDA C++ Programming Guide, CUDA Environment Variables).
    """
    gpus = nvml.gpus()
    if not gpus:
        lost = f" ({'; '.join(nvml.lost)})" if nvml.lost else ""
        raise NoDriverError(
            f"expected a GPU, found a driver without any that responds{lost}: see nvidia-smi, or {NO_GPU_NEEDED}"
        )
    setting = environment.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return gpus
    visible: list[Gpu] = []
    for entry in (part.strip() for part in setting.split(",")):
        gpu = _by_cuda_index(gpus, entry, environment) if entry.isdecimal() else _by_uuid(gpus, entry)
        if gpu is None or gpu in visible:
            break
        visible.append(gpu)
    if not visible:
        raise UserError(
            f"expected CUDA_VISIBLE_DEVICES to name one of {_listed(gpus)}, found {setting!r}: change or unset it, "
            f"or {NO_GPU_NEEDED}"
        )
    return visible


def _by_cuda_index(gpus: Sequence[Gpu], entry: str, environment: Mapping[str, str]) -> Gpu | None:
    """Return the GPU with an index in CUDA's order, which equals NVML's if all GPUs are alike or PCI_BUS_ID is set."""
    names = {gpu.index: gpu.name for gpu in reversed(gpus) if not gpu.is_instance}
    if environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and len(set(names.values())) > 1:
        raise UserError(
            f"expected UUIDs in CUDA_VISIBLE_DEVICES on a machine with different GPUs, found the index {entry}, which "
            f"CUDA and NVML count differently: use one of {_listed(gpus)}, or set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    # CUDA shows the first instance of a GPU in MIG mode
    return next((gpu for gpu in gpus if gpu.index == int(entry)), None)


def _by_uuid(gpus: Sequence[Gpu], beginning: str) -> Gpu | None:
    """Return the only GPU whose UUID begins like this. The UUID of a GPU in MIG mode stands for its first instance."""
    if not beginning.startswith(("GPU-", "MIG-")):
        return None
    matches = [gpu for gpu in gpus if gpu.uuid.startswith(beginning)]
    if len(matches) == 1:
        return matches[0]
    return next((gpu for gpu in gpus if gpu.is_instance and gpu.board_uuid == beginning), None)


def candidates(visible: Sequence[Gpu], setting: str) -> list[Gpu]:
    """Return the visible GPUs that `backend.gpu` allows: all, or the one with that UUID or index of nvidia-smi."""
    if setting == AUTO:
        return list(visible)
    if setting.isdecimal():
        matches = [gpu for gpu in visible if gpu.index == int(setting)]
    else:
        matches = [gpu for gpu in [_by_uuid(visible, setting)] if gpu is not None]
    if len(matches) == 1:
        return matches
    what = f"{len(matches)} MIG instances" if matches else "none"
    raise UserError(
        f"expected backend.gpu to be auto or to name one of {_listed(visible)}, found {what} for {setting!r}: "
        "change it, or CUDA_VISIBLE_DEVICES if that hides the GPU"
    )


def _listed(gpus: Sequence[Gpu]) -> str:
    return "[" + ", ".join(f"{gpu.uuid} ({gpu.name})" for gpu in gpus) + "]"


def free_gpus(nvml: Nvml, gpus: Sequence[Gpu], record: bool) -> list[tuple[Gpu, OtherProcesses]]:
    """Return the GPUs without other processes, or all of them if `record` is set; raise UserError if there are none."""
    checked = [(gpu, other_processes_on(nvml, gpu)) for gpu in gpus]
    usable = [(gpu, others) for gpu, others in checked if others.none or record]
    if usable:
        return sorted(usable, key=lambda pair: not pair[1].none)
    busy = "; ".join(f"{others} on {gpu.uuid}" for gpu, others in checked)
    raise UserError(
        f"expected a GPU without other processes, found {busy}: wait, name another with backend.gpu=UUID, or use "
        "it anyway with backend.on_busy=record"
    )


@contextmanager
def claimed(nvml: Nvml, gpus: Sequence[Gpu], record: bool, wait_seconds: float) -> Iterator[tuple[Gpu, OtherProcesses]]:
    """Lock the first GPU that is available against other measurements of this user, and yield it.

    Its processes are listed after it is locked, so that another measurement does not count as someone else's process.
    """
    locks = {gpu: FileLock(_lock_path(gpu), timeout=0, thread_local=False) for gpu in gpus}
    try:
        chosen, others = free_gpus(nvml, _hold(locks, wait_seconds), record)[0]
        for gpu, lock in locks.items():
            if gpu != chosen:
                lock.release()
        yield chosen, others
    finally:
        for lock in locks.values():
            lock.release()


def _hold(locks: Mapping[Gpu, FileLock], wait_seconds: float) -> list[Gpu]:
    """Wait until at least one lock is free, and return the GPUs whose locks were acquired."""
    until = time.monotonic() + wait_seconds
    while not (held := [gpu for gpu, lock in locks.items() if _acquire(lock)]):
        if time.monotonic() > until:
            raise UserError(
                f"expected one measurement at a time on {_listed(list(locks))}, found others that held it for "
                f"{wait_seconds:g} s: wait until they end, or name another GPU with backend.gpu=UUID"
            )
        time.sleep(POLL_SECONDS)
    return held


def _acquire(lock: FileLock) -> bool:
    try:
        lock.acquire()
    except Timeout:
        return False
    return True


def _lock_path(gpu: Gpu) -> Path:
    """Return a path for this user, who cannot lock the files of others; NVML shows the processes of other users."""
    return Path(tempfile.gettempdir()) / f"vramcast-{os.getuid()}-{gpu.uuid}.lock"
