"""A measurement's child from its start to the end of all that it started: what it answered, said, and how it ended."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vramcast.dataset_builder.child_process import TICK_SECONDS, ChildProcess, ending_in_words
from vramcast.dataset_builder.measure.cuda.protocol import CONTEXT, GO
from vramcast.virtual_gpu.measurement import EVIDENCE_LENGTH

LEAVE_SECONDS = 10.0
"""What a child is given to end by itself after its result: CUDA takes its context down."""
LONGEST_ANSWER_BYTES = 2**20


@dataclass(frozen=True)
class Ending:
    """All that a child left behind."""

    result: Mapping[str, Any] | None
    """What it reported last, None if it came to no result."""
    fault: str | None
    """What is wrong with its reports, None if nothing is."""
    timed_out: bool
    exit_code: int | None
    """Negative for a signal, None for a process that could not be ended."""
    said: str
    """The last lines that it printed, joined."""

    @property
    def evidence(self) -> str:
        """How it ended, in a line, with the last that it printed."""
        ending = self.fault or ending_in_words(self.exit_code)
        return f"{ending}: {self.said[-EVIDENCE_LENGTH + len(ending) + 2 :]}" if self.said else ending[:EVIDENCE_LENGTH]


def supervise(
    command: Sequence[str],
    environment: Mapping[str, str],
    request: Mapping[str, Any],
    timeout_seconds: float,
    on_context: Callable[[int, Mapping[str, Any]], None],
    on_tick: Callable[[], None],
) -> Ending:
    """Run a child to its end, or to its deadline, and end its whole process group in any case.

    The child reads the request as one line of its standard input and answers in lines of JSON on a pipe of its own,
    whose number is the command's last word. When it reports that its context exists, it waits until `on_context`,
    told its process id, has returned. What either callback raises ends the child and is passed on.
    """
    watch = _Watch(ChildProcess(command, environment, LONGEST_ANSWER_BYTES), time.monotonic() + timeout_seconds)
    try:
        watch.child.send(json.dumps(request).encode() + b"\n")
        watch.follow(on_context, on_tick)
    finally:
        watch.child.end()
    return watch.ending()


class _Watch:
    def __init__(self, child: ChildProcess, deadline: float) -> None:
        self.child = child
        self._deadline = deadline
        self._result: Mapping[str, Any] | None = None
        self._timed_out = False

    def follow(self, on_context: Callable[[int, Mapping[str, Any]], None], on_tick: Callable[[], None]) -> None:
        """Take in what comes until the child has ended, is out of time, or talks nonsense."""
        while self.child.fault is None:
            ended = self.child.has_ended()  # asked before the last of its words is read
            patience = 0.0 if ended else max(0.0, min(TICK_SECONDS, self._deadline - time.monotonic()))
            for event in self.child.reports(patience):
                self._take(event, on_context)
            on_tick()
            if ended or self._is_late():
                return

    def _is_late(self) -> bool:
        late = time.monotonic() >= self._deadline
        self._timed_out = late and self._result is None
        return late

    def _take(self, event: Mapping[str, Any], on_context: Callable[[int, Mapping[str, Any]], None]) -> None:
        if event["event"] == CONTEXT:
            on_context(self.child.process.pid, event)
            self.child.send(GO)
        elif self._result is None:
            self._result = event
            self._deadline = min(self._deadline, time.monotonic() + LEAVE_SECONDS)

    def ending(self) -> Ending:
        child = self.child
        return Ending(self._result, child.fault, self._timed_out, child.process.returncode, child.said)
