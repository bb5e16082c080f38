"""A backend that does what a spec says, in a module that workers can import by name."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from vramcast.dataset_builder.backends._base import Backend, BackendResult
from vramcast.errors import UserError
from vramcast.jobs.spec import Spec
from vramcast.virtual_gpu.measurement import Measurement, Status
from vramcast.virtual_gpu.training.setup import TrainingSetup


class Scripted(Backend):
    """A backend whose behaviour each spec prescribes."""

    name = "scripted"
    origin = "static"

    def measure(self, spec):
        detail = getattr(self, spec.network["do"])(*spec.network["with"]) or {}
        return BackendResult(Measurement(status=Status.OK, allocated_bytes=7, breakdown=detail))

    def nothing(self):
        pass

    def pid(self):
        return {"pid": os.getpid()}

    def threads(self):
        return {"threads": int(os.environ["OMP_NUM_THREADS"])}

    def gpu(self):
        return {"gpu": int(os.environ["CUDA_VISIBLE_DEVICES"]), "pid": os.getpid()}

    def sleep(self, seconds):
        time.sleep(seconds)

    def meet(self, mine, other):
        """Return only if another spec runs at the same time."""
        Path(mine).touch()
        while not Path(other).exists():
            time.sleep(0.01)

    def pass_gate(self, log, gate):
        """Record that it runs, and continue when the gate exists."""
        with Path(log).open("a") as file:
            file.write(f"{os.getpid()}\n")
        while not Path(gate).exists():
            time.sleep(0.01)

    def kill_host(self):
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)

    def fail(self, message):
        raise RuntimeError(message)

    def leave(self):
        sys.exit(3)

    def misuse(self):
        raise UserError("expected a GPU, found none: add one")

    def unpicklable(self):
        return {"bytes": lambda: 0}

    def end(self, code, words):
        print(words, file=sys.stderr)
        os._exit(code)

    def kill(self, number):
        os.kill(os.getpid(), number)
        time.sleep(60)

    def deafen(self):
        os.closerange(3, 64)
        time.sleep(60)

    def hang(self, file):
        child = subprocess.Popen(["sleep", "60"])
        temporary = Path(file).with_suffix(".part")
        temporary.write_text(f"{os.getpid()} {child.pid}")
        temporary.rename(file)
        time.sleep(60)

    def hang_with_lock(self, file):
        Path(file).write_text(str(os.getpid()))
        ctypes.PyDLL(None).sleep(60)


class Laned(Scripted):
    """A backend that needs one of three devices."""

    def __init__(self, lane=None):
        self.lane = lane

    def lanes(self):
        return [Laned(number) for number in range(3)]

    def alone(self, folder):
        """Fail if another worker uses the same device."""
        file = Path(folder) / f"lane-{self.lane}"
        file.touch(exist_ok=False)
        time.sleep(0.03)
        file.unlink()
        return {"lane": self.lane}


class DiesOnLoad(Scripted):
    def __setstate__(self, state):
        print("no such library", file=sys.stderr)
        os._exit(3)

    def __getstate__(self):
        return {"any": 1}


class RefusesOnLoad(DiesOnLoad):
    def __setstate__(self, state):
        raise UserError("expected a driver, found none: install one")


def spec(index: int, do: str = "nothing", *args: Any) -> Spec:
    return Spec("mlp", {"index": index, "do": do, "with": list(args)}, TrainingSetup(batch_size=1))


def plain(number: int) -> list[Spec]:
    return [spec(index) for index in range(number)]


def index_of(item: Spec) -> int:
    return int(item.network["index"])


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not.

    The first thread of a killed process may be over before the others, which still hold its files open.
    """
    return any(map(_runs, Path(f"/proc/{pid}/task").glob("*/stat")))


def _runs(stat: Path) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def worker_processes() -> list[int]:
    """Return the workers of executors that this process itself started and that still run."""
    return [pid for pid in _children() if alive(pid) and b"_worker_main" in _command(pid)]


def _children() -> list[int]:
    tasks = Path("/proc/self/task").glob("*/children")
    return [int(pid) for task in tasks for pid in task.read_text().split()]


def _command(pid: int) -> bytes:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def wait_until(condition: Any, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())
