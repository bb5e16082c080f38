"""Compares the first steps of a real run with its forecast, and reports the peak to a service."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vramcast.collocation.callbacks.forecast import Forecast
from vramcast.collocation.client import Client, ServiceError
from vramcast.errors import UserError, check_count
from vramcast.models.answer import Answer
from vramcast.virtual_gpu.allocator.sizes import MIB

_log = logging.getLogger("vramcast")
_STEPS = 3
"""The caching allocator holds all that a step takes after the second; the third proves it."""


@dataclass(frozen=True)
class RunComparison:
    """Peaks of torch's allocator in a real run beside those of its forecast, in MiB."""

    steps: int
    allocated_mib: float
    reserved_mib: float
    forecast: Forecast

    @property
    def error(self) -> float:
        """Return by which part of it the forecast of the reserved memory was too low; negative if it was too high."""
        return self.reserved_mib / self.forecast.reserved_mib - 1

    @property
    def process_mib(self) -> float:
        """Return the memory of the process: the reserved memory, and the context as it was forecast."""
        return self.reserved_mib + self.forecast.context_mib

    @property
    def is_safe(self) -> bool:
        """Return True if the safe figure covers the run."""
        return self.process_mib <= self.forecast.safe_mib

    def __str__(self) -> str:
        expected = self.forecast
        covers = "covers" if self.is_safe else "does NOT cover"
        return (
            f"after {self.steps} steps torch reserves {self.reserved_mib:,.0f} MiB, forecast "
            f"{expected.reserved_mib:,.0f} ({self.error:+.1%}), and has allocated {self.allocated_mib:,.0f} MiB, "
            f"forecast {expected.allocated_mib:,.0f}; the safe figure of {expected.safe_mib:,.0f} MiB {covers} the "
            "process with its context"
        )


class RunObserver:
    """Counts the optimizer steps of a run, and reads the peaks of torch.cuda after the first ones and at the end.

    Args:
        forecast: An answer, its JSON, or a file with what `vramcast run --json` or `classify --json` printed.
        steps: The optimizer steps after which the run is compared.
        job: The job as the service knows it; without it, nothing is sent.
        service: The URL of `vramcast serve`, or a client.
        token: The token of the service.
    """

    def __init__(
        self,
        forecast: Answer | Mapping[str, Any] | str | Path,
        *,
        steps: int = _STEPS,
        job: Mapping[str, Any] | None = None,
        service: str | Client | None = None,
        token: str | None = None,
    ) -> None:
        check_count("steps", steps)
        if (job is None) != (service is None):
            raise UserError("expected a job and a service together, found one of them: give both, or none")
        self.forecast = Forecast.of(forecast)
        self.comparison: RunComparison | None = None
        """Of the first steps; None before them, and without a GPU."""
        self._steps = steps
        self._job = job
        self._client = Client(service, token=token) if isinstance(service, str) else service
        self._reported_mib = 0.0

    def note_step(self, count: int) -> None:
        """Note that so many optimizer steps have ended; compare the run once."""
        if self.comparison is not None or count < self._steps:
            return
        self.comparison = self._compared(count)
        if self.comparison is not None:
            _log.log(logging.INFO if self.comparison.is_safe else logging.WARNING, "%s", self.comparison)
            self._report(self.comparison)

    def note_end(self, count: int) -> None:
        """Note that the training has ended; report the peak again if it has grown, as an evaluation makes it."""
        last = self._compared(count) if self.comparison is not None else None
        if last is not None and last.process_mib > self._reported_mib:
            _log.log(logging.INFO if last.is_safe else logging.WARNING, "%s", last)
            self._report(last)

    def _compared(self, count: int) -> RunComparison | None:
        if not torch.cuda.is_available():
            return None
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return RunComparison(count, allocated / MIB, reserved / MIB, self.forecast)

    def _report(self, comparison: RunComparison) -> None:
        """Send the peak to the service; a service that is away must not end the training."""
        self._reported_mib = comparison.process_mib
        if self._client is None or self._job is None:
            return
        try:
            self._client.observe(self._job, comparison.process_mib, self.forecast.device)
        except ServiceError as error:
            _log.warning("the service did not take the observation: %s", error)
