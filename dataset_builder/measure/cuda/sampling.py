"""A thread that looks at a GPU every few milliseconds and keeps the peaks."""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

from vramcast.dataset_builder.measure.cuda.choice import Others
from vramcast.dataset_builder.measure.nvml import Gpu, GpuLostError, GpuProcess, Nvml, NvmlError

T = TypeVar("T")

MOST_FAILURES = 10
"""NVML may fail for a moment, while a process ends say; so often in a row is no moment."""


@dataclass(frozen=True)
class Share:
    """What a job has of a GPU. None is unknown."""

    process_bytes: int | None
    """As NVML counts for the process."""
    device_bytes: int | None
    """By which the device's use has grown; unknown while others, who may grow too, are on it."""

    @property
    def most_bytes(self) -> int | None:
        """The wider of the two: the device also counts what the driver holds for a context, but names no process."""
        return max((value for value in (self.process_bytes, self.device_bytes) if value is not None), default=None)


class Sampler:
    """Looks at a GPU from `with` to the end of its block; peaks are read when it is over.

    It is entered before the child exists. Until `identify` says which process is the child's, those that come new
    are nobody's: they may be the child under a process id of the host.
    """

    def __init__(self, nvml: Nvml, gpu: Gpu, others: Others, interval_seconds: float) -> None:
        self._nvml, self._gpu, self._interval_seconds = nvml, gpu, interval_seconds
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vramcast-sampler", daemon=True)
        self._before = frozenset(item.pid for item in others.processes)
        self._own: int | None = None
        self._identified = False
        self._process_peaks: dict[int, int] = {}
        self._last: float | None = None
        self._used_before_bytes = self._peak_used_bytes = 0
        self.failure: NvmlError | None = None
        """What ended the sampling early: a GPU that is lost, say."""
        self.samples = 0
        self.longest_gap_seconds = 0.0
        self.alone = others.nobody
        """Whether no other process was on the GPU at any time, as far as the driver tells."""
        self.others_bytes = others.held_bytes
        """What others held at most, None where the driver does not tell."""

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
            due = max(due + self._interval_seconds, time.monotonic())  # a late sample makes no later ones hurry
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
        """Look once, now."""
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
            if item.pid in self._before or (self._identified and item.pid != self._own):
                self.alone = False
                others_bytes = _sum(others_bytes, item.used_bytes)
        known = self.others_bytes is not None and others_bytes is not None
        self.others_bytes = max(self.others_bytes or 0, others_bytes or 0) if known else None

    def identify(self, pid: int) -> None:
        """Find the child among the processes, now that its context exists.

        In a container NVML names processes as the host does: then the one that is new must be the child.
        """
        processes = self._patiently(self._nvml.processes) or ()
        with self._lock:
            new = {item.pid for item in processes} - self._before
            self._own = pid if pid in new else next(iter(new)) if len(new) == 1 else None
            self._identified = True
        self._patiently(lambda _: self.sample())

    def share(self) -> Share:
        """The job's part of the peaks so far."""
        with self._lock:
            process_bytes = None if self._own is None else self._process_peaks.get(self._own)
            grown_bytes = self._peak_used_bytes - self._used_before_bytes
            return Share(process_bytes, max(0, grown_bytes) if self.alone else None)

    def wait_until_gone(self, seconds: float) -> None:
        """Wait for the driver to take back what the child held: it does so after the process has ended."""
        until = time.monotonic() + seconds
        while not self._is_gone() and time.monotonic() < until:
            time.sleep(self._interval_seconds)

    def _is_gone(self) -> bool:
        """By its pid; where the driver names none, by what is used."""
        if self._own is not None:
            return not any(item.pid == self._own for item in self._patiently(self._nvml.processes) or ())
        return self._patiently(self._nvml.memory).used_bytes <= self._used_before_bytes

    def _patiently(self, ask: Callable[[Gpu], T]) -> T:
        """Ask NVML, which may fail for a moment while a process comes or ends."""
        for _ in range(MOST_FAILURES - 1):
            try:
                return ask(self._gpu)
            except GpuLostError:
                raise
            except NvmlError:
                time.sleep(self._interval_seconds)
        return ask(self._gpu)


def _sum(left_bytes: int | None, right_bytes: int | None) -> int | None:
    return None if left_bytes is None or right_bytes is None else left_bytes + right_bytes
