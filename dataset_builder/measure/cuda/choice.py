"""Which GPU a spec is measured on: what this process may see, what was asked for, and who else is there."""

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from vramcast.dataset_builder.measure.nvml import NO_GPU_NEEDED, Gpu, GpuProcess, NoDriverError, Nvml
from vramcast.errors import UserError
from vramcast.virtual_gpu.sizes import MIB

AUTO = "auto"
IDLE_BYTES = 128 * 2**20
"""A card may hold so much without a process that NVML names, and still count as free."""
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Others:
    """What is on a GPU before a child is started there."""

    processes: tuple[GpuProcess, ...]
    held_bytes: int | None
    """By all of them, None where the driver does not tell."""

    @property
    def nobody(self) -> bool:
        """Whether the GPU is free."""
        return not self.processes and not self.held_bytes

    def __str__(self) -> str:
        named = [
            f"pid {item.pid}" + ("" if item.used_bytes is None else f" with {item.used_bytes // MIB} MiB")
            for item in self.processes
        ]
        return ", ".join(named) or f"{(self.held_bytes or 0) // MIB} MiB of a process that NVML does not name"


def others_on(nvml: Nvml, gpu: Gpu) -> Others:
    """Who is on a GPU. Where no process is named, memory that is used anyway tells of one (as in a container)."""
    processes, memory = nvml.processes(gpu), nvml.memory(gpu)
    if processes:
        amounts = [item.used_bytes for item in processes]
        return Others(tuple(processes), None if None in amounts else sum(amount or 0 for amount in amounts))
    unnamed = memory.reserved_bytes is not None and memory.used_bytes > IDLE_BYTES
    return Others((), memory.used_bytes if unnamed else 0 if processes is not None else None)


def visible_gpus(nvml: Nvml, environment: Mapping[str, str]) -> list[Gpu]:
    """The GPUs that CUDA would show to a process of this environment, in its order.

    As CUDA reads CUDA_VISIBLE_DEVICES: indices, or beginnings of UUIDs; what follows an entry that names nothing
    does not count (CUDA C++ Programming Guide, CUDA Environment Variables).
    """
    gpus = nvml.gpus()
    if not gpus:
        lost = f" ({'; '.join(nvml.lost)})" if nvml.lost else ""
        raise NoDriverError(
            f"expected a GPU, found a driver and none that answers{lost}: see nvidia-smi, or {NO_GPU_NEEDED}"
        )
    asked = environment.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return gpus
    found: list[Gpu] = []
    for entry in (part.strip() for part in asked.split(",")):
        gpu = _by_cuda_index(gpus, entry, environment) if entry.isdecimal() else _by_uuid(gpus, entry)
        if gpu is None or gpu in found:
            break
        found.append(gpu)
    if not found:
        raise UserError(
            f"expected CUDA_VISIBLE_DEVICES to name one of {_listed(gpus)}, found {asked!r}: change or unset it, "
            f"or {NO_GPU_NEEDED}"
        )
    return found


def _by_cuda_index(gpus: Sequence[Gpu], entry: str, environment: Mapping[str, str]) -> Gpu | None:
    """An index counts cards in CUDA's order, which is NVML's only if all are alike or the environment says so."""
    cards = {gpu.index: gpu.name for gpu in reversed(gpus) if not gpu.is_instance}
    if environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and len(set(cards.values())) > 1:
        raise UserError(
            f"expected UUIDs in CUDA_VISIBLE_DEVICES on a machine with different cards, found the index {entry}, which "
            f"CUDA and NVML count differently: use one of {_listed(gpus)}, or set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    # of a card in MIG mode CUDA shows the first instance
    return next((gpu for gpu in gpus if gpu.index == int(entry)), None)


def _by_uuid(gpus: Sequence[Gpu], beginning: str) -> Gpu | None:
    """The one GPU whose UUID begins so. The UUID of a card in MIG mode stands for its first instance."""
    if not beginning.startswith(("GPU-", "MIG-")):
        return None
    found = [gpu for gpu in gpus if gpu.uuid.startswith(beginning)]
    if len(found) == 1:
        return found[0]
    return next((gpu for gpu in gpus if gpu.is_instance and gpu.card_uuid == beginning), None)


def candidates(visible: Sequence[Gpu], asked: str) -> list[Gpu]:
    """The visible GPUs that a setting allows: all, or the one with that UUID or index of nvidia-smi."""
    if asked == AUTO:
        return list(visible)
    if asked.isdecimal():
        found = [gpu for gpu in visible if gpu.index == int(asked)]
    else:
        found = [gpu for gpu in [_by_uuid(visible, asked)] if gpu is not None]
    if len(found) == 1:
        return found
    what = f"{len(found)} MIG instances" if found else "none"
    raise UserError(
        f"expected backend.gpu to be auto or to name one of {_listed(visible)}, found {what} for {asked!r}: "
        "change it, or CUDA_VISIBLE_DEVICES if that hides the GPU"
    )


def _listed(gpus: Sequence[Gpu]) -> str:
    return "[" + ", ".join(f"{gpu.uuid} ({gpu.name})" for gpu in gpus) + "]"


def free_gpus(nvml: Nvml, gpus: Sequence[Gpu], record: bool) -> list[tuple[Gpu, Others]]:
    """Those on which nobody runs, or all of them if that is to be recorded; never none."""
    looked = [(gpu, others_on(nvml, gpu)) for gpu in gpus]
    found = [(gpu, others) for gpu, others in looked if others.nobody or record]
    if found:
        return sorted(found, key=lambda pair: not pair[1].nobody)
    busy = "; ".join(f"{others} on {gpu.uuid}" for gpu, others in looked)
    raise UserError(
        f"expected a GPU on which nobody else runs, found {busy}: wait, name another with backend.gpu=UUID, or take "
        "it as it is with backend.on_busy=record"
    )


@contextmanager
def claimed(nvml: Nvml, gpus: Sequence[Gpu], record: bool, wait_seconds: float) -> Iterator[tuple[Gpu, Others]]:
    """The first of the GPUs that can be had, held against other measurements of this user for the time of a block.

    Who is on a GPU is looked at once it is held: what another measurement has there is not someone else's.
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
    """The GPUs whose locks can be had: as many as there are, at least one."""
    until = time.monotonic() + wait_seconds
    while not (held := [gpu for gpu, lock in locks.items() if _acquire(lock)]):
        if time.monotonic() > until:
            raise UserError(
                f"expected one measurement at a time on {_listed(list(locks))}, found others there for "
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
    """For each user, since one cannot lock another's file; other users' processes are seen by NVML."""
    return Path(tempfile.gettempdir()) / f"vramcast-{os.getuid()}-{gpu.uuid}.lock"
