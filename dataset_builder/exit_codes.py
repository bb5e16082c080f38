"""How every command ends: in an exit code, and in one sentence where it is the user's to mend."""

import os
import sys
from collections.abc import Callable

from vramcast.errors import UserError, WorkerError

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
"""The last as shells count SIGINT."""


def exit_code(command: str, work: Callable[[], int | None]) -> int:
    """Carry out a command of that name; None counts as 0."""
    try:
        code = work() or 0
        sys.stdout.flush()
    except UserError as error:
        print(f"{command}: {error}", file=sys.stderr)
        return BAD_INPUT
    except WorkerError as error:
        print(f"{command}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `| head` closed the pipe: not an error of ours, nor of the interpreter's last flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"{command}: expected files to read and write, found: {error}; mend that", file=sys.stderr)
        return BAD_INPUT
    return code
