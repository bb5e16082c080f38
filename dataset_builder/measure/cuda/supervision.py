"""A child process from its start to the end of all that it started: what it answered, what it said, how it ended."""

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dataset_builder.measure.cuda.protocol import CONTEXT, GO

TICK_SECONDS = 0.05
"""How often the child's end, the deadline and the sampler are looked at while nothing comes."""
LEAVE_SECONDS = 10.0
"""What a child is given to end by itself after its result: CUDA takes its context down."""
TERM_SECONDS = 1.0
KILL_SECONDS = 5.0
"""A process that waits inside a hung driver cannot be killed, and is not waited for longer than this."""
PIPE_BYTES = 65_536
"""All that a pipe of Linux holds: one read empties it, however much is to come (pipe(7))."""
TAIL_BYTES = 16_384
LONGEST_ANSWER_BYTES = 2**20
LAST_LINES = 5
EVIDENCE_LENGTH = 500


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
        ending = self.fault or _in_words(self.exit_code)
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
    child = _Child(command, environment, time.monotonic() + timeout_seconds)
    try:
        child.send(json.dumps(request).encode() + b"\n")
        child.follow(on_context, on_tick)
    finally:
        child.end()
    return child.ending()


class _Child:
    def __init__(self, command: Sequence[str], environment: Mapping[str, str], deadline: float) -> None:
        self._deadline = deadline
        self._answers, theirs = os.pipe()
        self._output, printed = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*command, str(theirs)],
                stdin=subprocess.PIPE,
                stdout=printed,  # libraries print there what belongs to the evidence
                stderr=printed,
                pass_fds=(theirs,),
                env=dict(environment),
                start_new_session=True,  # a group of its own, which can be ended whole
            )
        except BaseException:
            os.close(self._answers)
            os.close(self._output)
            raise
        finally:
            os.close(theirs)
            os.close(printed)
        for channel in (self._answers, self._output):
            os.set_blocking(channel, False)
        self._tail, self._unread = bytearray(), bytearray()
        self._result: Mapping[str, Any] | None = None
        self._fault: str | None = None
        self._timed_out = False

    def send(self, data: bytes) -> None:
        if self._process.stdin:
            with suppress(BrokenPipeError):  # it is dead already, and how is seen later
                self._process.stdin.write(data)
                self._process.stdin.flush()

    def follow(self, on_context: Callable[[int, Mapping[str, Any]], None], on_tick: Callable[[], None]) -> None:
        """Take in what comes until the child has ended, is out of time, or talks nonsense."""
        with selectors.DefaultSelector() as selector:
            for channel in (self._answers, self._output):
                selector.register(channel, selectors.EVENT_READ)
            while self._fault is None:
                ended = self._has_ended()  # asked before the last of its words is read
                patience = 0.0 if ended else max(0.0, min(TICK_SECONDS, self._deadline - time.monotonic()))
                for key, _ in selector.select(patience) if selector.get_map() else ():
                    if not self._read(key.fd):
                        selector.unregister(key.fd)
                for event in self._events():
                    self._take(event, on_context)
                on_tick()
                if ended or self._is_late():
                    return
                if not selector.get_map():
                    time.sleep(min(TICK_SECONDS, patience))

    def _is_late(self) -> bool:
        late = time.monotonic() >= self._deadline
        self._timed_out = late and self._result is None
        return late

    def _read(self, channel: int) -> bool:
        """Take what is in a pipe; False at its end."""
        try:
            data = os.read(channel, PIPE_BYTES)
        except BlockingIOError:
            return True
        if channel == self._answers:
            self._unread += data
            if len(self._unread) > LONGEST_ANSWER_BYTES:
                self._fault = f"the child's answer has no end (over {LONGEST_ANSWER_BYTES} bytes)"
        else:
            self._tail = (self._tail + data)[-TAIL_BYTES:]
        return bool(data)

    def _events(self) -> list[Mapping[str, Any]]:
        *lines, rest = self._unread.split(b"\n")
        self._unread = bytearray(rest)
        found: list[Mapping[str, Any]] = []
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                event = None
            if not isinstance(event, dict) or "event" not in event:
                self._fault = f"the child's answer is no report ({bytes(line[:80])!r})"
                return found
            found.append(event)
        return found

    def _take(self, event: Mapping[str, Any], on_context: Callable[[int, Mapping[str, Any]], None]) -> None:
        if event["event"] == CONTEXT:
            on_context(self._process.pid, event)
            self.send(GO)
        elif self._result is None:
            self._result = event
            self._deadline = min(self._deadline, time.monotonic() + LEAVE_SECONDS)

    def _has_ended(self) -> bool:
        """Whether the child is dead, without reaping it: while it is a zombie, its group's number is its own."""
        with suppress(ChildProcessError):
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        return True

    def end(self) -> None:
        """End the group: kindly while its leader lives, then all that is left of it."""
        if not self._has_ended():
            self._signal(signal.SIGTERM)
            self._wait(TERM_SECONDS)
        self._signal(signal.SIGKILL)
        self._wait(KILL_SECONDS)
        self._read(self._output)
        if self._has_ended():
            self._process.wait()
        if self._process.stdin:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        os.close(self._answers)
        os.close(self._output)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._has_ended() and time.monotonic() < until:
            time.sleep(0.005)

    def ending(self) -> Ending:
        lines = self._tail.decode(errors="replace").splitlines()
        said = " | ".join([line.strip() for line in lines if line.strip()][-LAST_LINES:])
        return Ending(self._result, self._fault, self._timed_out, self._process.returncode, said)


def _in_words(exit_code: int | None) -> str:
    if exit_code is None:
        return "the child cannot be ended: it waits inside the driver"
    if exit_code >= 0:
        return f"the child ended with exit code {exit_code}"
    try:
        return f"the child was killed by {signal.Signals(-exit_code).name}"
    except ValueError:  # a real-time signal
        return f"the child was killed by signal {-exit_code}"
