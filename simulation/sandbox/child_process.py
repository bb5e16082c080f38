"""Child processes with a protocol: lines on their standard input, lines of JSON on a pipe of their own.

This is the parent's side. A child calls `end_with_parent` to end with its parent.
"""

import ctypes
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from vramcast.simulation.sandbox.process_tree import end_descendants

TICK_SECONDS = 0.05
"""Interval between checks for the child's end while it reports nothing."""
TERM_SECONDS = 1.0
KILL_SECONDS = 5.0
"""A process that hangs inside the driver cannot be killed; the parent waits no longer than this."""
PIPE_BYTES = 65_536
"""Capacity of a pipe on Linux: one read empties it (pipe(7))."""
TAIL_BYTES = 16_384
_LAST_LINES = 5
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent() -> None:
    """Have Linux kill this process when its parent ends, even while C code holds the interpreter lock."""
    with suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def write_line(channel: int, value: Mapping[str, Any]) -> None:
    """Write a mapping as one complete line of JSON."""
    rest = json.dumps(value).encode() + b"\n"
    while rest:
        rest = rest[os.write(channel, rest) :]


class ChildProcess:
    """A process in its own process group; its last argument is the number of the pipe on which it reports."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        longest_answer_bytes: int,
        directory: Path | None = None,
    ) -> None:
        self.fault: str | None = None
        """An error in its reports; None if they are well-formed."""
        self._longest_answer_bytes = longest_answer_bytes
        self._tail, self._unread, self._unsent = bytearray(), bytearray(), bytearray()
        self._searched = 0
        self._answers, theirs = os.pipe()
        self._output, printed = os.pipe()
        try:
            self.process = subprocess.Popen(
                [*command, str(theirs)],
                stdin=subprocess.PIPE,
                bufsize=0,
                stdout=printed,  # libraries print errors there that belong to the evidence
                stderr=printed,
                pass_fds=(theirs,),
                env=dict(environment),
                cwd=directory,
                start_new_session=True,  # its own process group, which can be killed as a whole
            )
        except BaseException:
            os.close(self._answers)
            os.close(self._output)
            raise
        finally:
            os.close(theirs)
            os.close(printed)
        self._selector = selectors.DefaultSelector()
        for channel in (self._answers, self._output):
            os.set_blocking(channel, False)
            self._selector.register(channel, selectors.EVENT_READ)
        if self.process.stdin:
            os.set_blocking(self.process.stdin.fileno(), False)

    def send(self, data: bytes) -> None:
        """Write to its standard input; what a busy child does not read yet is sent while waiting for reports."""
        if self.process.stdin:
            waiting = bool(self._unsent)
            self._unsent += data
            if not waiting and not self._flush():
                self._selector.register(self.process.stdin, selectors.EVENT_WRITE)

    def _flush(self) -> bool:
        """Write what the pipe takes; return False while some is left."""
        try:
            while self._unsent and self.process.stdin:
                del self._unsent[: os.write(self.process.stdin.fileno(), self._unsent[:PIPE_BYTES])]
        except BlockingIOError:
            return False
        except BrokenPipeError:  # the child has ended; the caller finds out how
            self._unsent.clear()
        return True

    def reports(self, patience_seconds: float) -> list[Mapping[str, Any]]:
        """Return its reports, mappings with an 'event'; wait up to `patience_seconds` for the first."""
        if not self._selector.get_map():
            time.sleep(min(TICK_SECONDS, patience_seconds))
        else:
            for key, _ in self._selector.select(patience_seconds):
                done = self._flush() if key.fileobj is self.process.stdin else not self._read(key.fd)
                if done:
                    self._selector.unregister(key.fileobj)
        return self._events()

    def _read(self, channel: int) -> bool:
        """Read what is in a pipe; return False at its end."""
        try:
            data = os.read(channel, PIPE_BYTES)
        except BlockingIOError:
            return True
        if channel == self._answers:
            self._unread += data
            if len(self._unread) > self._longest_answer_bytes:
                self.fault = f"the child's answer is too long (over {self._longest_answer_bytes} bytes)"
        else:
            self._printed(data)
        return bool(data)

    def _printed(self, data: bytes) -> None:
        """Keep the end of what the child prints."""
        self._tail = (self._tail + data)[-TAIL_BYTES:]

    def _events(self) -> list[Mapping[str, Any]]:
        if self._unread.find(b"\n", self._searched) < 0:  # a long line is not searched again with each piece
            self._searched = len(self._unread)
            return []
        *lines, rest = self._unread.split(b"\n")
        self._unread, self._searched = bytearray(rest), len(rest)
        events: list[Mapping[str, Any]] = []
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                event = None
            if not isinstance(event, dict) or "event" not in event:
                self.fault = f"the child's answer is not a report ({bytes(line[:80])!r})"
                return events
            events.append(event)
        return events

    def has_ended(self) -> bool:
        """Return True if the child has ended, without reaping it: a zombie keeps the number of its group reserved."""
        with suppress(ChildProcessError):
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        return True

    def end(self) -> None:
        """End the process group: SIGTERM while its leader runs, then SIGKILL for the rest and all descendants."""
        if not self.has_ended():
            self._signal(signal.SIGTERM)
            self._wait(TERM_SECONDS)
        end_descendants(self.process.pid, KILL_SECONDS)
        self._signal(signal.SIGKILL)
        self._wait(KILL_SECONDS)
        self._read(self._output)
        if self.has_ended():
            self.process.wait()
        if self.process.stdin:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
        self._selector.close()
        os.close(self._answers)
        os.close(self._output)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self.has_ended() and time.monotonic() < until:
            time.sleep(0.005)

    @property
    def last_output(self) -> str:
        """The last lines that it printed, joined."""
        return last_lines(self._tail)


def describe_exit(exit_code: int | None) -> str:
    """Return how a child ended, as a clause."""
    if exit_code is None:
        return "the child cannot be killed: it hangs inside the driver"
    if exit_code >= 0:
        return f"the child ended with exit code {exit_code}"
    return f"the child was killed by {signal_name(-exit_code)}"


def signal_name(number: int) -> str:
    """Return 'SIGKILL', or 'signal 40' for a real-time signal, which has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_lines(printed: bytes | bytearray) -> str:
    """Return the last lines of a process's output, joined."""
    lines = printed.decode(errors="replace").splitlines()
    return " | ".join([line.strip() for line in lines if line.strip()][-_LAST_LINES:])
