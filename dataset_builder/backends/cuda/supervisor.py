"""Run the child of a measurement, and end it with all processes that it started."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vramcast.child.process import Child, ChildError, ChildTimeoutError, Limits, describe_exit
from vramcast.dataset_builder.backends.cuda.protocol import CONTEXT, GO
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

    After the child reports that its context exists, it waits until `on_context`, called with its process id, has
    returned. An exception in either callback ends the child.
    """
    result: Mapping[str, Any] | None = None
    timed_out = False
    limits = Limits()
    with Child(command, environment, LONGEST_ANSWER_BYTES) as child:
        limits.extend(timeout_seconds)
        child.send({**request, "parent": os.getpid()})
        try:
            for message in child.follow(limits, on_tick):
                if message["event"] == CONTEXT:
                    on_context(child.process.pid, message)
                    child.send(GO)
                elif result is None:
                    result = message
                    limits.deadline = min(limits.deadline, time.monotonic() + LEAVE_SECONDS)
        except ChildError as error:
            timed_out = isinstance(error, ChildTimeoutError) and result is None
    return ChildEnd(result, child.fault, timed_out, child.process.returncode, child.last_output)
