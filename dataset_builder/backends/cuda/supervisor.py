"""Run the child of a measurement, and end it with all processes that it started."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vramcast.dataset_builder.backends.cuda.protocol import CONTEXT, GO
from vramcast.simulation.sandbox.child_process import TICK_SECONDS, ChildProcess, describe_exit
from vramcast.virtual_gpu.measurement import EVIDENCE_LENGTH

LEAVE_SECONDS = 10.0
"""Time for a child to exit by itself after its result, while CUDA destroys its context."""
LONGEST_ANSWER_BYTES = 2**20


@dataclass(frozen=True)
class ChildEnd:
    """How a child ended: its result, its output and its exit code."""

    result: Mapping[str, Any] | None
    """Its last report; None if it produced no result."""
    fault: str | None
    """An error in its reports; None if they are well-formed."""
    timed_out: bool
    exit_code: int | None
    """Negative for a signal; None for a process that could not be killed."""
    output: str
    """The last lines that it printed, joined."""

    @property
    def evidence(self) -> str:
        """One line: how it ended, and the last lines that it printed."""
        end = self.fault or describe_exit(self.exit_code)
        return f"{end}: {self.output[-EVIDENCE_LENGTH + len(end) + 2 :]}" if self.output else end[:EVIDENCE_LENGTH]


def supervise(
    command: Sequence[str],
    environment: Mapping[str, str],
    request: Mapping[str, Any],
    timeout_seconds: float,
    on_context: Callable[[int, Mapping[str, Any]], None],
    on_tick: Callable[[], None],
) -> ChildEnd:
    """Run a child until it exits or its timeout expires; in any case kill its whole process group.

    The child reads the request as one line of its standard input and reports in lines of JSON on a pipe of its own,
    whose number is the last argument of the command. After it reports that its context exists, it waits until
    `on_context`, called with its process id, has returned. An exception in either callback ends the child.
    """
    supervisor = _Supervisor(
        ChildProcess(command, environment, LONGEST_ANSWER_BYTES), time.monotonic() + timeout_seconds
    )
    try:
        supervisor.child.send(json.dumps(request).encode() + b"\n")
        supervisor.follow(on_context, on_tick)
    finally:
        supervisor.child.end()
    return supervisor.child_end()


class _Supervisor:
    def __init__(self, child: ChildProcess, deadline: float) -> None:
        self.child = child
        self._deadline = deadline
        self._result: Mapping[str, Any] | None = None
        self._timed_out = False

    def follow(self, on_context: Callable[[int, Mapping[str, Any]], None], on_tick: Callable[[], None]) -> None:
        """Process reports until the child has ended, its timeout has expired, or a report is malformed."""
        while self.child.fault is None:
            ended = self.child.has_ended()  # checked before its last reports are read
            patience = 0.0 if ended else max(0.0, min(TICK_SECONDS, self._deadline - time.monotonic()))
            for event in self.child.reports(patience):
                self._process(event, on_context)
            on_tick()
            if ended or self._is_late():
                return

    def _is_late(self) -> bool:
        late = time.monotonic() >= self._deadline
        self._timed_out = late and self._result is None
        return late

    def _process(self, event: Mapping[str, Any], on_context: Callable[[int, Mapping[str, Any]], None]) -> None:
        if event["event"] == CONTEXT:
            on_context(self.child.process.pid, event)
            self.child.send(GO)
        elif self._result is None:
            self._result = event
            self._deadline = min(self._deadline, time.monotonic() + LEAVE_SECONDS)

    def child_end(self) -> ChildEnd:
        child = self.child
        return ChildEnd(self._result, child.fault, self._timed_out, child.process.returncode, child.last_output)
