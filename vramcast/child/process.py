"""The parent's side: start a child, exchange messages within limits of time and memory, and end it with its tree."""

import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from vramcast import start
from vramcast.child.channel import PIPE_BYTES
from vramcast.child.messages import Decoder, encode
from vramcast.child.process_tree import descendants, end_descendants, memory_bytes

TICK_SECONDS = 0.05
"""Interval between checks for the child's end while it reports nothing."""
TERM_SECONDS = 1.0
KILL_SECONDS = 5.0
"""A process that hangs inside the driver cannot be killed; the parent waits no longer than this."""
TAIL_BYTES = 16_384
_LAST_LINES = 5


class ChildError(Exception):
    """A child gave no answer."""


class ChildEndedError(ChildError):
    """It ended, or what it sent is not a message."""


class ChildTimeoutError(ChildError):
    """It took longer than its limit."""


class ChildMemoryError(ChildError):
    """It took more of this machine's memory than its limit."""


@dataclass
class Limits:
    """How long a child may take, and how much memory with all that it started."""

    deadline: float = math.inf
    """By `time.monotonic`; it may be moved while messages arrive."""
    memory_bytes: float = math.inf

    def extend(self, seconds: float) -> None:
        """Move the deadline to `seconds` from now."""
        self.deadline = time.monotonic() + seconds


def module_command(
    module: str, *arguments: str, python: str | Path = sys.executable, flags: Sequence[str] = ()
) -> list[str]:
    """Return the command that runs a module of vramcast as a child, in any interpreter that has torch."""
    return [str(python), *flags, start.__file__, module, *arguments]


class Child:
    """A process in a session of its own; its last argument is the number of the pipe on which it reports."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        longest_answer_bytes: float,
        directory: Path | None = None,
        log: IO[bytes] | None = None,
        term_seconds: float = TERM_SECONDS,
    ) -> None:
        """Start it. Without a log, its output is read here, and the end of it is `last_output`.

        `end` gives it `term_seconds` after SIGTERM.
        """
        self._term_seconds = term_seconds
        self._decoder = Decoder(longest_answer_bytes, "event")
        self._log = log
        self._tail, self._unsent = bytearray(), bytearray()
        self.is_deaf = self.is_silent = False
        """It closed its end of the requests, or of the reports: most likely it has ended."""
        self._answers, theirs = os.pipe()
        self._output, printed = os.pipe()
        try:
            self.process = subprocess.Popen(
                [*command, str(theirs)],
                stdin=subprocess.PIPE,
                bufsize=0,
                stdout=log or printed,  # libraries print errors there that belong to the evidence
                stderr=log or printed,
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def fileno(self) -> int:
        """Return a descriptor that is readable when `messages` has work to do."""
        return self._selector.fileno()  # of epoll, or of kqueue

    @property
    def fault(self) -> str | None:
        """An error in its messages; None if they are well-formed."""
        return self._decoder.fault

    def send(self, message: Mapping[str, Any], payload: bytes | None = None) -> bool:
        """Send a request, and return False if nobody can read it.

        A busy child reads later: the rest is sent while the parent waits for messages.
        """
        if self.process.stdin:
            waiting = bool(self._unsent)
            self._unsent += encode(message, payload)
            if not waiting and not self._flush():
                self._selector.register(self.process.stdin, selectors.EVENT_WRITE)
        return not self.is_deaf

    def _flush(self) -> bool:
        """Write what the pipe takes; return False while some is left."""
        try:
            while self._unsent and self.process.stdin:
                del self._unsent[: os.write(self.process.stdin.fileno(), self._unsent[:PIPE_BYTES])]
        except BlockingIOError:
            return False
        except BrokenPipeError:  # the child has ended; the caller finds out how
            self._unsent.clear()
            self.is_deaf = True
        return True

    def messages(self, patience_seconds: float = 0.0) -> list[dict[str, Any]]:
        """Return its messages, each with an 'event'; wait up to `patience_seconds` for the first."""
        if not self._selector.get_map():
            time.sleep(min(TICK_SECONDS, patience_seconds))
            return []
        arrived: list[dict[str, Any]] = []
        for key, _ in self._selector.select(patience_seconds):
            if key.fileobj is self.process.stdin:
                done = self._flush()
            else:
                data = _read(key.fd)
                done = data == b""
                if key.fd == self._answers:
                    self.is_silent = done
                    arrived += self._decoder.feed(data or b"")
                else:
                    self.printed(data or b"")
            if done:
                self._selector.unregister(key.fileobj)
        return arrived

    def printed(self, data: bytes) -> None:
        """Keep the end of what the child prints."""
        self._tail = (self._tail + data)[-TAIL_BYTES:]

    def follow(self, limits: Limits, on_tick: Callable[[], None] = lambda: None) -> Iterator[dict[str, Any]]:
        """Yield its messages for as long as it runs within its limits; then raise `ChildError`.

        Args:
            limits: The caller may change them while it takes messages.
            on_tick: Called after each look at the child.
        """
        while True:
            ended = self.has_ended()  # looked at before its last messages are read
            left_seconds = 0.0 if ended else limits.deadline - time.monotonic()
            yield from self.messages(max(0.0, min(TICK_SECONDS, left_seconds)))
            on_tick()
            if ended or self.fault is not None:
                raise ChildEndedError(self.ending)
            if time.monotonic() >= limits.deadline:
                raise ChildTimeoutError(self.ending)
            if limits.memory_bytes < math.inf:
                taken_bytes = memory_bytes(descendants(self.process.pid), limits.memory_bytes)
                if taken_bytes > limits.memory_bytes:
                    raise ChildMemoryError(self.ending)

    def ask(self, message: Mapping[str, Any], limits: Limits, payload: bytes | None = None) -> dict[str, Any]:
        """Send a request and return the answer; raise `ChildError` if there is none."""
        self.send(message, payload)
        return next(self.follow(limits))

    def has_ended(self) -> bool:
        """Return True if the process has ended."""
        return self.exit_code is not None

    @property
    def exit_code(self) -> int | None:
        """Negative for a signal, None while it runs. A zombie is not reaped: it keeps the number of its group."""
        if self.process.returncode is not None:
            return self.process.returncode
        try:
            status = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # somebody else reaped it
            return self.process.wait()
        if status is None:
            return None
        return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status

    def kill(self) -> None:
        """Kill the process group at once."""
        self._signal(signal.SIGKILL)

    def close_requests(self) -> None:
        """Tell the child that no request follows."""
        if self.process.stdin:
            if self.process.stdin in self._selector.get_map():  # an interrupt may have come before it was registered
                self._selector.unregister(self.process.stdin)
            self._unsent.clear()
            self.process.stdin.close()
            self.process.stdin = None

    def end(self) -> None:
        """End the process group: SIGTERM while its leader runs, then SIGKILL for the rest and all descendants."""
        if not self.has_ended():
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)  # a script may have stopped whoever started it
            self.wait(self._term_seconds)
        self.end_now()

    def end_now(self) -> None:
        """Kill the process group and all descendants, and release the pipes."""
        end_descendants(self.process.pid, KILL_SECONDS)
        self.kill()
        self.wait(KILL_SECONDS)
        self.printed(_read(self._output) or b"")
        if self.has_ended():
            self.process.wait()
        self.close_requests()
        self._selector.close()
        os.close(self._answers)
        os.close(self._output)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def wait(self, seconds: float) -> None:
        """Wait for its end."""
        until = time.monotonic() + seconds
        while not self.has_ended() and time.monotonic() < until:
            time.sleep(0.005)

    @property
    def last_output(self) -> str:
        """The last lines that it printed, joined."""
        if self._log is None:
            return last_lines(self._tail)
        size = os.fstat(self._log.fileno()).st_size
        return last_lines(os.pread(self._log.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES)))

    @property
    def ending(self) -> str:
        """How it ended, with its last output."""
        ending = self.fault or describe_exit(self.exit_code)
        return f"{ending}: {self.last_output}" if self.last_output else ending


def wait_for(children: Iterable[Child], seconds: float) -> list[Child]:
    """Return the children whose `messages` have work to do; wait up to `seconds` for the first."""
    with selectors.PollSelector() as selector:
        for child in children:
            selector.register(child, selectors.EVENT_READ, child)
        return [key.data for key, _ in selector.select(seconds)]


def _read(channel: int) -> bytes | None:
    """Return what is in a pipe: nothing at its end, None if it is empty."""
    try:
        return os.read(channel, PIPE_BYTES)
    except BlockingIOError:
        return None


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
