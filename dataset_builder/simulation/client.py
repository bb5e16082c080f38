"""The parent's side of an inspection in a child process: requests within limits of time and memory, and what fails."""

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
from vramcast.dataset_builder.child_process import TICK_SECONDS, ChildProcess, ending_in_words
from vramcast.dataset_builder.jobs.targets import Wanted
from vramcast.dataset_builder.simulation.child import DONE, REFUSED
from vramcast.dataset_builder.simulation.findings import Curve, Findings
from vramcast.errors import UserError
from vramcast.virtual_gpu.sizes import MIB

if TYPE_CHECKING:  # a child is started before this process imports torch
    from vramcast.virtual_gpu.profile import DeviceProfile

TIMEOUT_SECONDS = 600.0
MEMORY_MIB = 8192
_LONGEST_ANSWER_BYTES = 2**28
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class TheirError(Exception):
    """An exception of a user's code: shown as his, with the line."""

    def __init__(self, summary: str, place: str | None, traceback: str) -> None:
        super().__init__(f"{summary} (at {place})" if place else summary)
        self.traceback = traceback


class ChildInspection:
    """A network in a child process: built once, examined under one training setup after the other."""

    def __init__(self, wanted: Wanted, timeout_seconds: float = TIMEOUT_SECONDS, memory_mib: int = MEMORY_MIB) -> None:
        self._closed = False
        self._timeout_seconds = timeout_seconds
        self._memory_mib = memory_mib
        command = [sys.executable, "-P", start.__file__, "vramcast.dataset_builder.simulation.child"]
        self._child = ChildProcess(command, _environment(), _LONGEST_ANSWER_BYTES, Path(wanted.directory))
        self._built = True
        self.turn_to(wanted)

    def turn_to(self, wanted: Wanted) -> None:
        """Build another network in the same process: for libraries, whose code does not get into each other's way."""
        if not self._built:
            with suppress(UserError, TheirError):  # of a network that nobody asked about
                self._receive()
        self._send({"do": "build", "wanted": wanted.to_json()})
        self._built = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child, and all that it started."""
        if not self._closed:
            self._closed = True
            self._child.end()

    @property
    def alive(self) -> bool:
        """Whether it can be asked again: after an error of a network it can, after a broken limit it cannot."""
        return not self._closed and not self._child.has_ended()

    def examine(self, wishes: Mapping[str, Any], profiles: Sequence["DeviceProfile"]) -> Findings:
        """What the network takes under a setup, on some devices."""
        request = {"do": "examine", "wishes": dict(wishes), "devices": [asdict(item) for item in profiles]}
        return Findings.from_json(self._ask(request)["findings"])

    def curve(self, wishes: Mapping[str, Any], profile: "DeviceProfile") -> Curve:
        """The memory over time on a device."""
        return Curve(**self._ask({"do": "curve", "wishes": dict(wishes), "device": asdict(profile)})["curve"])

    def _ask(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        if not self._built:  # it was asked for when the child was started, to be done while this process imports torch
            self._built = True
            self._receive()
        self._send(request)
        return self._receive()

    def _send(self, request: Mapping[str, Any]) -> None:
        self._child.send(json.dumps(request).encode() + b"\n")

    def _receive(self) -> Mapping[str, Any]:
        """The next report, as long as the child keeps within its limits."""
        if self._closed:
            raise UserError("expected an inspection that goes on, found one that was ended: begin another")
        deadline = time.monotonic() + self._timeout_seconds
        while True:
            ended = self._child.has_ended()
            for report in self._child.reports(0.0 if ended else TICK_SECONDS):
                return _checked(report)
            if ended or self._child.fault is not None:
                self.close()
                raise TheirError(_last_words(self._child), None, self._child.said)
            if time.monotonic() >= deadline:
                self.close()
                raise UserError(
                    f"expected an inspection within {self._timeout_seconds:g} s, found none: raise --timeout"
                )
            if _resident_bytes(self._child.process.pid) > self._memory_mib * MIB:
                self.close()
                raise UserError(
                    f"expected an inspection in {self._memory_mib} MiB of this machine's memory, found that it took "
                    "more: raise --memory-limit-mib, or build the network without large tensors of its own"
                )


def _checked(report: Mapping[str, Any]) -> Mapping[str, Any]:
    if report["event"] == DONE:
        return report
    if report["event"] == REFUSED:
        raise UserError(str(report["reason"]))
    raise TheirError(str(report["summary"]), report["place"], str(report["traceback"]))


def _last_words(child: ChildProcess) -> str:
    ending = child.fault or ending_in_words(child.process.returncode)
    return f"{ending}: {child.said}" if child.said else ending


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):  # gone, or not Linux
        return 0


def _environment() -> dict[str, str]:
    """This process's, offline, with one thread: nothing is computed."""
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    own = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **offline, **own}
