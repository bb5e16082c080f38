"""The parent's side of a simulation in a child process: requests, limits of time and memory, and errors."""

import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from vramcast.child.process import (
    Child,
    ChildError,
    ChildMemoryError,
    ChildTimeoutError,
    Limits,
    module_command,
)
from vramcast.errors import UserError
from vramcast.jobs.network_files.description import NetworkDescription
from vramcast.jobs.targets import LIBRARIES, BuildRequest
from vramcast.simulation.result import Curve, OrderPeaks, Simulation
from vramcast.simulation.sandbox.child import OPEN_FILES, PROTECTED
from vramcast.simulation.sandbox.failures import NetworkError, raise_failure
from vramcast.simulation.sandbox.isolation import ALLOWED, BLOCKED, OPEN, SUPERVISOR_SECONDS, clean_environment
from vramcast.virtual_gpu.allocator.sizes import MIB

if TYPE_CHECKING:  # the child starts before this process imports torch
    from vramcast.virtual_gpu.profile import DeviceProfile
    from vramcast.virtual_gpu.replay.length_orders import LengthOrders

TIMEOUT_SECONDS = 600.0
MEMORY_MIB = 8192
_LONGEST_ANSWER_BYTES = 2**26
_OPEN_NOTE = "the network's code could reach the Internet: this machine allows neither a network namespace nor seccomp"


class ChildSimulator:
    """A job in a child process, built once and simulated under any training options."""

    def __init__(
        self,
        request: BuildRequest,
        timeout_seconds: float = TIMEOUT_SECONDS,
        memory_mib: int = MEMORY_MIB,
        *,
        allow_network: bool = False,
        unprotected: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._closed = False
        self._timeout_seconds = timeout_seconds
        self._memory_mib = memory_mib
        self._python = interpreter(request.python) if request.python else None
        self._answered = False
        self._failure: UserError | NetworkError | None = None
        self._notes: tuple[str, ...] = ()
        python = self._python or sys.executable
        protects = not unprotected and request.target.kind not in LIBRARIES  # a library's own code writes nothing
        words = (ALLOWED if allow_network else BLOCKED, PROTECTED if protects else OPEN_FILES)
        variables = {**clean_environment(os.environ, allow_network=allow_network), **(environment or {})}
        if self._python:
            variables.pop("PYTHONHOME", None)
        try:
            self._child = Child(
                module_command("vramcast.simulation.sandbox.child", *words, python=python),
                variables,
                _LONGEST_ANSWER_BYTES,
                Path(request.directory),
                term_seconds=SUPERVISOR_SECONDS,
            )
        except OSError as error:  # not a program, or a program for another machine
            raise UserError(
                f"expected a Python interpreter at {python}, found: {error.strerror}; name another by --python"
            ) from error
        self._built = True
        self.build(request)

    def build(self, request: BuildRequest) -> None:
        """Build another network in the same process: only for libraries, whose modules do not clash."""
        if not self._built:
            with suppress(UserError, NetworkError):  # the error of a network that nobody simulated
                self._receive()
        self._child.send({"do": "build", "request": request.to_json()})
        self._built, self._failure = False, None

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
        simulation = Simulation.from_json(self._ask(request)["simulation"])
        return replace(simulation, notes=(*simulation.notes, *self._notes))

    def describe(self, options: Mapping[str, Any]) -> NetworkDescription:
        """Return the layers and the training of the job after one forward pass: nothing is traced or simulated."""
        answer = self._ask({"do": "describe", "options": dict(options)})
        return NetworkDescription.from_json(answer["description"])

    def curve(self, options: Mapping[str, Any], profile: "DeviceProfile") -> Curve:
        """Return the memory over time on a device."""
        return Curve(**self._ask({"do": "curve", "options": dict(options), "device": asdict(profile)})["curve"])

    def by_order(self, options: Mapping[str, Any], profile: "DeviceProfile", orders: "LengthOrders") -> OrderPeaks:
        """Return the peaks of runs whose batches come in these orders."""
        request = {"do": "by_order", "options": dict(options), "device": asdict(profile), "orders": asdict(orders)}
        return OrderPeaks.from_json(self._ask(request)["peaks"])

    def _ask(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        if not self._built:  # requested when the child started, so that it builds while this process imports torch
            self._built = True
            self._finish_build()
        if self._failure is not None:
            raise self._failure
        self._child.send(request)
        return self._receive()

    def _finish_build(self) -> None:
        """Receive the answer to the build request; its error is the answer to every later request, too."""
        try:
            network = self._receive()["network"]
        except (UserError, NetworkError) as error:
            self._failure = error
        else:
            self._notes = (_OPEN_NOTE,) if network == OPEN else ()

    def _receive(self) -> Mapping[str, Any]:
        """Wait for the next answer while the child stays within its limits."""
        if self._closed:
            raise UserError("expected a running child process, found a closed one: start another")
        limits = Limits(time.monotonic() + self._timeout_seconds, self._memory_mib * MIB)
        try:
            answer = next(self._child.follow(limits))
        except ChildError as error:
            self.close()
            raise self._in_words(error) from None
        self._answered = True
        raise_failure(answer)
        return answer

    def _in_words(self, error: ChildError) -> Exception:
        """Return the error for a child without an answer."""
        if isinstance(error, ChildTimeoutError):
            return UserError(f"expected a simulation within {self._timeout_seconds:g} s, found none: raise --timeout")
        if isinstance(error, ChildMemoryError):
            return UserError(
                f"expected a simulation in {self._memory_mib} MiB of this machine's memory, found that it took "
                "more: raise --memory-limit-mib, or build the network without large tensors"
            )
        ending = self._child.ending
        if self._python and not self._answered:
            return UserError(f"expected a Python interpreter at {self._python}, found another program: {ending}")
        return NetworkError(ending, None, self._child.last_output)


def interpreter(python: str) -> str:
    """Return the path of the interpreter that a path, a command or the directory of an environment names."""
    try:
        path = Path(python).expanduser()
        program = shutil.which(path / "bin" / "python" if path.is_dir() else path)
    except (OSError, ValueError, RuntimeError):  # too long for a path, a NUL character, the home of an unknown user
        program = None
    if program is None:
        raise UserError(
            f"expected a Python interpreter at {python}, found none: name one such as .venv/bin/python by --python"
        )
    return os.path.abspath(program)  # noqa: PTH100 - links stay, because they tell an interpreter its environment
