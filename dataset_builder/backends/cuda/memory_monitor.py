"""A thread that polls the memory of a GPU every few milliseconds and keeps the peaks."""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

from vramcast.dataset_builder.backends.cuda.gpu_choice import OtherProcesses
from vramcast.device.nvml import Gpu, GpuLostError, GpuProcess, Nvml, NvmlError

T = TypeVar("T")

MOST_FAILURES = 10
"""NVML may fail briefly, for example while a process ends; after this many failures in a row the monitor stops."""


@dataclass(frozen=True)
class JobMemory:
    """GPU memory of a job, in two views. None is unknown."""

    process_bytes: int | None
    """NVML's figure for the process."""
    device_bytes: int | None
    """Growth of the device's use; unknown while other processes, which may grow as well, are on it."""

    @property
    def most_bytes(self) -> int | None:
        """The larger of the two: the device also counts what the driver holds for a context."""
        return max((value for value in (self.process_bytes, self.device_bytes) if value is not None), default=None)


class MemoryMonitor:
    """Polls a GPU inside its `with` block; peaks are read after the block.

    It is entered before the child exists. Until `identify` finds the child's process, new processes do not count as
    others: one may be the child under a process id of the host.
    """

    def __init__(self, nvml: Nvml, gpu: Gpu, others: OtherProcesses, interval_seconds: float) -> None:
        self._nvml, self._gpu, self._interval_seconds = nvml, gpu, interval_seconds
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vramcast-monitor", daemon=True)
        self._before = frozenset(item.pid for item in others.processes)
        self._child_pid: int | None = None
        self._identified = False
        self._process_peaks: dict[int, int] = {}
        self._last: float | None = None
        self._used_before_bytes = self._peak_used_bytes = 0
        self.failure: NvmlError | None = None
        """The error that ended the monitoring early, such as a lost GPU."""
        self.samples = 0
        self.longest_gap_seconds = 0.0
        self.alone = others.none
        """True if no other process was on the GPU at any time, as far as the driver reports."""
        self.others_bytes = others.held_bytes
        """Peak memory of other processes; None where the driver does not report it."""

    def __enter__(self) -> Self:
        self._used_before_bytes = self._nvml.memory(self._gpu).used_bytes
        self.sample()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        due, failures = time.monotonic(), 0
        while not self._stop.is_set():
            due = max(
                due + self._interval_seconds, time.monotonic()
            )  # after a late sample the next ones keep the interval
            self._stop.wait(due - time.monotonic())
            try:
                self.sample()
                failures = 0
            except NvmlError as error:
                failures += 1
                if failures >= MOST_FAILURES or isinstance(error, GpuLostError):
                    self.failure = error
                    return

    def sample(self) -> None:
        """Poll once, now."""
        with self._lock:
            used_bytes = self._nvml.memory(self._gpu).used_bytes
            processes = self._nvml.processes(self._gpu)
            now = time.monotonic()
            if self._last is not None:
                self.longest_gap_seconds = max(self.longest_gap_seconds, now - self._last)
            self._last = now
            self.samples += 1
            self._peak_used_bytes = max(self._peak_used_bytes, used_bytes)
            self._count(processes or ())

    def _count(self, processes: Iterable[GpuProcess]) -> None:
        others_bytes: int | None = 0
        for item in processes:
            if item.used_bytes is not None:
                self._process_peaks[item.pid] = max(item.used_bytes, self._process_peaks.get(item.pid, 0))
            if item.pid in self._before or (self._identified and item.pid != self._child_pid):
                self.alone = False
                others_bytes = _sum(others_bytes, item.used_bytes)
        if self.others_bytes is not None:
            self.others_bytes = None if others_bytes is None else max(self.others_bytes, others_bytes)

    def identify(self, pid: int) -> None:
        """Find the child among the processes after its context was created.

        In a container NVML reports process ids of the host, so the only new process must be the child.
        """
        processes = self._retried(self._nvml.processes) or ()
        with self._lock:
            new = {item.pid for item in processes} - self._before
            self._child_pid = pid if pid in new else next(iter(new)) if len(new) == 1 else None
            self._identified = True
        self._retried(lambda _: self.sample())

    def job_memory(self) -> JobMemory:
        """Return the job's part of the peaks so far."""
        with self._lock:
            process_bytes = None if self._child_pid is None else self._process_peaks.get(self._child_pid)
            grown_bytes = self._peak_used_bytes - self._used_before_bytes
            return JobMemory(process_bytes, max(0, grown_bytes) if self.alone else None)

    def wait_until_gone(self, seconds: float) -> None:
        """Wait until the driver has freed the child's memory, which happens after the process has ended."""
        until = time.monotonic() + seconds
        while not self._is_gone() and time.monotonic() < until:
            time.sleep(self._interval_seconds)

    def _is_gone(self) -> bool:
        """Check the child's pid or, where the driver lists no processes, the used memory."""
        if self._child_pid is not None:
            return not any(item.pid == self._child_pid for item in self._retried(self._nvml.processes) or ())
        return self._retried(self._nvml.memory).used_bytes <= self._used_before_bytes

    def _retried(self, call: Callable[[Gpu], T]) -> T:
        """Call NVML, which may fail briefly while a process starts or ends."""
        for _ in range(MOST_FAILURES - 1):
            try:
                return call(self._gpu)
            except GpuLostError:
                raise
            except NvmlError:
                time.sleep(self._interval_seconds)
        return call(self._gpu)


def _sum(left_bytes: int | None, right_bytes: int | None) -> int | None:
    return None if left_bytes is None or right_bytes is None else left_bytes + right_bytes
