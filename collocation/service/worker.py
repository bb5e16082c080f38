"""A worker process of the service: reads pickled calls and writes their pickled results, until its input ends.

Each message is a length and as many bytes.
"""

import importlib
import pickle
import resource
import struct
import sys
from typing import IO, Any

HEADER = struct.Struct(">I")
"""The length of the message that follows."""
RESULT, REFUSED = "result", "refused"
_RESULT_BYTES = 64 << 20
"""The largest result: the service keeps results in memory."""


def main() -> None:
    """Run calls until there are no more."""
    memory_bytes, module = int(sys.argv[1]), sys.argv[2]
    # Private memory alone: torch maps gigabytes of libraries that take no memory.
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    calls, results = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # the output of a library must not be taken for a result
    importlib.import_module(module)
    _write(results, b"ready")
    while len(head := calls.read(HEADER.size)) == HEADER.size:
        data = calls.read(HEADER.unpack(head)[0])
        _write(results, _result(data))


def _result(data: bytes) -> bytes:
    """Run a call. Any error is an error of this call alone: the next may be sound."""
    from vramcast.errors import UserError  # noqa: PLC0415

    try:
        result = pickle.dumps((RESULT, pickle.loads(data)()))  # noqa: S301 - from the service itself
        if len(result) <= _RESULT_BYTES:
            return result
        refusal = UserError(
            f"expected a job with a result of at most {_RESULT_BYTES} bytes, found more: make it smaller"
        )
    except UserError as error:
        refusal = error
    except Exception as error:
        refusal = UserError(_sentence(error))
    return pickle.dumps((REFUSED, refusal))


def _sentence(error: Exception) -> str:
    """Return the first line of an error: torch says there which part of a network cannot run."""
    lines = f"{type(error).__name__}: {error}".splitlines() if str(error) else [type(error).__name__]
    return f"expected a job that can be simulated, found {lines[0][:300]}: change it"


def _write(stream: IO[bytes], data: Any) -> None:
    stream.write(HEADER.pack(len(data)) + data)
    stream.flush()


if __name__ == "__main__":
    main()
