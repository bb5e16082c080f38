"""The virtual GPU as a backend that measures a spec at several batch sizes and on several devices from one sweep."""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vramcast.dataset_builder.backends._base import Backend, BackendResult
from vramcast.errors import UserError, check_count
from vramcast.jobs.spec import Spec
from vramcast.simulation.batch_sweep import BatchSweep, SweptSize
from vramcast.simulation.result import Peaks
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.measurement import EVIDENCE_LENGTH, Measurement, Status
from vramcast.virtual_gpu.profile import DeviceProfile

_WIDEST = 64
"""Ratio of the largest to the smallest batch size of a sweep."""
_REPEAT_SECONDS = 0.5


@dataclass(frozen=True)
class SweptSettings:
    """The settings of `backend=swept`."""

    batches: int = 12
    """Most batch sizes of a network."""
    devices: Sequence[str] = ()
    """Names of more device profiles."""
    others: int = 1
    """How many of them a row has."""
    limit_seconds: float = 10.0
    """CPU time for a network, with its table and all batch sizes."""
    allocator: str = ""

    def __post_init__(self) -> None:
        check_count("backend.batches", self.batches)
        check_count("backend.others", self.others, least=0)


class TooSlow(Exception):  # noqa: N818 - an outcome of a draw
    """A network whose sweep takes longer than the limit."""


class SweptBackend(Backend):
    """Simulates a spec and siblings of it with smaller batches, which share its network and most of its traces.

    Every row has the peaks on the first device, and on `others` of the other devices, which take turns by spec. With
    its result, a spec carries the detailed layer table of its network.
    """

    name = "virtual"
    origin = "simulated"

    def __init__(self, profiles: Sequence[DeviceProfile], settings: SweptSettings) -> None:
        self.profiles = tuple(profiles)
        self.settings = settings
        self.options = AllocatorOptions.parse(settings.allocator)
        self.device = profiles[0].name

    def measure(self, spec: Spec) -> BackendResult:
        """Trace the training of a spec at some batch sizes and replay it on the devices.

        If time runs out, the result has the sizes so far, the spec's own among the first.
        """
        results: dict[str, tuple[Spec, BackendResult]] = {}
        start, table, slow = time.process_time(), None, None
        try:
            with time_limit(self.settings.limit_seconds):
                sweep = BatchSweep(spec, self.profiles[0].compute_capability, self.options)
                table = sweep.table()
                for item in sweep.sizes(self.batch_sizes(spec)):
                    results[item.spec.id] = item.spec, self._result(sweep, item)
        except TooSlow as error:
            slow = str(error)
        except UserError as error:  # of this draw: no filter knows what a library can build and train
            return BackendResult(Measurement(status=Status.CRASHED, evidence=str(error)[:EVIDENCE_LENGTH]))
        if spec.id not in results:
            return BackendResult(Measurement(status=Status.TIMEOUT, evidence=slow))
        seconds = round((time.process_time() - start) / len(results), 4)
        timed = {key: (one, _timed(result, seconds)) for key, (one, result) in results.items()}
        _, own = timed.pop(spec.id)
        return replace(own, table=table, siblings=tuple(timed.values()))

    def _result(self, sweep: BatchSweep, item: SweptSize) -> BackendResult:
        peaks = sweep.peaks(item.trace, self.devices_of(item.spec))
        first = peaks.pop(self.profiles[0].name)
        needs = {name: _need(other) for name, other in peaks.items()}
        if first.bounded.status is not Status.OK:
            needs[self.profiles[0].name] = _need(first)
        return BackendResult(first.bounded, needs=needs)

    def batch_sizes(self, spec: Spec) -> list[int]:
        """Return the batch size of a spec and some smaller ones, half of them powers of two, drawn by its id."""
        largest, least = spec.training.batch_size, (spec.training.last_batch_size or 0) + 1
        least = min(max(least, 2 if largest > 1 else 1, -(-largest // _WIDEST)), largest)
        rng = np.random.RandomState(int(spec.id[:8], 16))
        shares = rng.random_sample(self.settings.batches - 1)
        drawn = [int(least * (largest / least) ** share) for share in shares]
        rounded = [max(2 ** (size.bit_length() - 1), least) if index % 2 else size for index, size in enumerate(drawn)]
        return sorted({*rounded, largest})

    def devices_of(self, spec: Spec) -> list[DeviceProfile]:
        """Return the first device, and those of the others whose turn it is."""
        first, *rest = self.profiles
        start = int(spec.id[8:12], 16)
        return [first, *(rest[(start + turn) % len(rest)] for turn in range(min(self.settings.others, len(rest))))]


def _need(peaks: Peaks) -> Measurement:
    need = peaks.unbounded or peaks.bounded
    return replace(need, status=peaks.bounded.status, notes=())


def _timed(result: BackendResult, seconds: float) -> BackendResult:
    return replace(result, measurement=replace(result.measurement, seconds=seconds))


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TooSlow` in the main thread after some CPU time, and again if it was lost in a callback."""

    def stop(*_: Any) -> None:
        raise TooSlow(f"the network took more than {seconds:g} s of CPU time to trace and replay")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, _REPEAT_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
