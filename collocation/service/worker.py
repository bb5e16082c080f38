"""A process that traces networks for the service: a length and a pickle in, the same out, until its input ends."""

import pickle
import resource
import struct
import sys
from typing import IO

HEADER = struct.Struct(">I")
"""The length of what follows."""
REFUSED, TRACED = "refused", "traced"


def main() -> None:
    """Answer until nobody asks."""
    memory_bytes = int(sys.argv[1])
    # Private memory alone: torch maps gigabytes of libraries that take none.
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what a library prints is not to be taken for an answer
    from vramcast.collocation.service.tracing import trace  # noqa: PLC0415 - torch, under the limit

    _write(answers, b"ready")
    while True:
        head = questions.read(HEADER.size)
        if len(head) < HEADER.size:
            return
        question = pickle.loads(questions.read(HEADER.unpack(head)[0]))  # noqa: S301 - from the service itself
        try:
            found: tuple[str, bytes | str] = (TRACED, trace(question))
        except Exception as error:  # of this network alone: the next may be sound
            found = (REFUSED, _sentence(error))
        _write(answers, pickle.dumps(found))


def _sentence(error: Exception) -> str:
    """Errors of ours are sentences already; torch's say what of the network cannot run."""
    from vramcast.errors import UserError  # noqa: PLC0415

    if isinstance(error, UserError):
        return str(error)
    found = f"{type(error).__name__}: {error}".splitlines()[0][:300] if str(error) else type(error).__name__
    return f"expected a network that can be traced, found {found}: change it"


def _write(stream: IO[bytes], data: bytes) -> None:
    stream.write(HEADER.pack(len(data)) + data)
    stream.flush()


if __name__ == "__main__":
    main()
