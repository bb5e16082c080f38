"""The parent's side of a simulation in a child process: requests, limits of time and memory, and errors."""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from vramcast import start
from vramcast.dataset_builder.child_process import TICK_SECONDS, ChildProcess, describe_exit
from vramcast.dataset_builder.jobs.targets import BuildRequest
from vramcast.dataset_builder.simulation.child import DONE, INTERNAL, REFUSED
from vramcast.dataset_builder.simulation.simulation import Curve, Simulation
from vramcast.errors import UserError
from vramcast.virtual_gpu.sizes import MIB

if TYPE_CHECKING:  # the child starts before this process imports torch
    from vramcast.virtual_gpu.profile import DeviceProfile

TIMEOUT_SECONDS = 600.0
MEMORY_MIB = 8192
_LONGEST_ANSWER_BYTES = 2**28
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class NetworkError(Exception):
    """An exception of the network's own code, with the user's line."""

    def __init__(self, summary: str, place: str | None, traceback: str) -> None:
        super().__init__(f"{summary} (at {place})" if place else summary)
        self.traceback = traceback


class InternalError(NetworkError):
    """An exception of vramcast itself in the child process."""


class ChildSimulator:
    """A job in a child process, built once and simulated under any training options."""

    def __init__(
        self, request: BuildRequest, timeout_seconds: float = TIMEOUT_SECONDS, memory_mib: int = MEMORY_MIB
    ) -> None:
        self._closed = False
        self._timeout_seconds = timeout_seconds
        self._memory_mib = memory_mib
        command = [sys.executable, "-P", start.__file__, "vramcast.dataset_builder.simulation.child"]
        self._child = ChildProcess(command, _environment(), _LONGEST_ANSWER_BYTES, Path(request.directory))
        self._built = True
        self.build(request)

    def build(self, request: BuildRequest) -> None:
        """Build another network in the same process: only for libraries, whose modules do not clash."""
        if not self._built:
            with suppress(UserError, NetworkError):  # the error of a network that nobody simulated
                self._receive()
        self._send({"do": "build", "request": request.to_json()})
        self._built = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child and all processes that it started."""
        if not self._closed:
            self._closed = True
            self._child.end()

    @property
    def alive(self) -> bool:
        """Whether the child can take more requests: yes after an error of a network, no after an exceeded limit."""
        return not self._closed and not self._child.has_ended()

    def simulate(self, options: Mapping[str, Any], profiles: Sequence["DeviceProfile"]) -> Simulation:
        """Simulate the job on some devices."""
        request = {"do": "simulate", "options": dict(options), "devices": [asdict(item) for item in profiles]}
        return Simulation.from_json(self._ask(request)["simulation"])

    def curve(self, options: Mapping[str, Any], profile: "DeviceProfile") -> Curve:
        """Return the memory over time on a device."""
        return Curve(**self._ask({"do": "curve", "options": dict(options), "device": asdict(profile)})["curve"])

    def _ask(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        if not self._built:  # requested when the child started, so that it builds while this process imports torch
            self._built = True
            self._receive()
        self._send(request)
        return self._receive()

    def _send(self, request: Mapping[str, Any]) -> None:
        self._child.send(json.dumps(request).encode() + b"\n")

    def _receive(self) -> Mapping[str, Any]:
        """Wait for the next report while the child stays within its limits."""
        if self._closed:
            raise UserError("expected a running child process, found a closed one: start another")
        deadline = time.monotonic() + self._timeout_seconds
        while True:
            ended = self._child.has_ended()
            for report in self._child.reports(0.0 if ended else TICK_SECONDS):
                return _checked(report)
            if ended or self._child.fault is not None:
                self.close()
                raise NetworkError(_last_words(self._child), None, self._child.last_output)
            if time.monotonic() >= deadline:
                self.close()
                raise UserError(
                    f"expected a simulation within {self._timeout_seconds:g} s, found none: raise --timeout"
                )
            if _resident_bytes(self._child.process.pid) > self._memory_mib * MIB:
                self.close()
                raise UserError(
                    f"expected a simulation in {self._memory_mib} MiB of this machine's memory, found that it took "
                    "more: raise --memory-limit-mib, or build the network without large tensors"
                )


def _checked(report: Mapping[str, Any]) -> Mapping[str, Any]:
    if report["event"] == DONE:
        return report
    if report["event"] == REFUSED:
        raise UserError(str(report["reason"]))
    kind = InternalError if report["event"] == INTERNAL else NetworkError
    raise kind(str(report["summary"]), report["place"], str(report["traceback"]))


def _last_words(child: ChildProcess) -> str:
    ending = child.fault or describe_exit(child.process.returncode)
    return f"{ending}: {child.last_output}" if child.last_output else ending


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):  # ended, or not Linux
        return 0


def _environment() -> dict[str, str]:
    """Return this environment, offline and with one thread, because nothing is computed."""
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    own = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **offline, **own}
