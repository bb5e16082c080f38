"""How every command parses its arguments and ends: an exit code, and one sentence for errors that a user can fix."""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

from vramcast.error_words import text_of
from vramcast.errors import UserError, WorkerError, check_choice

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
"""130 is the exit code that shells give a process ended by SIGINT."""


def checked(wanted: bool, passed: bool) -> int:
    """Return the exit code of a command whose `--check` was given or not."""
    return FAILED if wanted and not passed else 0


class CommandParser(argparse.ArgumentParser):
    """An argument parser that raises UserError, so that bad arguments read like any other bad input."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError instead of printing the usage."""
        raise UserError(f"expected the arguments of '{self.prog}', found: {message}; see {self.prog} --help")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Check a choice as the rest of vramcast does, with suggestions for a wrong name."""
        if action.choices is not None:
            name = "/".join(action.option_strings) or f"the command of {self.prog}"
            check_choice(name, value, list(action.choices))


def exit_code(command: str, work: Callable[[], int | None]) -> int:
    """Run the work of a command and return its exit code; None counts as 0."""
    try:
        code = work() or 0
        sys.stdout.flush()
    except UserError as error:
        print(f"{command}: {text_of(error)}", file=sys.stderr)
        return BAD_INPUT
    except WorkerError as error:
        print(f"{command}: {text_of(error)}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `| head` closed the pipe; the interpreter must not flush into it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"{command}: expected files to read and write, found: {text_of(error)}; fix that", file=sys.stderr)
        return BAD_INPUT
    return code


def interrupt_on_sigterm() -> None:
    """Treat SIGTERM like Ctrl-C, so that a command cleans up before it ends."""
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
