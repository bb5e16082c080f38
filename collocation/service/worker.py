"""A worker process of the service: runs pickled calls and reports their pickled results, until its input ends."""

import importlib
import pickle
import resource
import sys
from typing import Any

from vramcast.child.channel import Answer, Channel
from vramcast.child.messages import DONE, READY, REFUSED
from vramcast.errors import UserError

_RESULT_BYTES = 64 << 20
"""The largest result: the service keeps results in memory."""


def main(memory_bytes: int, module: str, report_fd: int) -> None:
    """Run calls until there are no more."""
    # Private memory alone: torch maps gigabytes of libraries that take no memory.
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    channel = Channel(report_fd)
    importlib.import_module(module)
    channel.report(READY)
    channel.serve(_answer)


def _answer(request: dict[str, Any]) -> Answer:
    """Run a call. Any error is an error of this call alone: the next may be sound."""
    try:
        result = pickle.dumps(pickle.loads(request["payload"])())  # noqa: S301 - from the service itself
        if len(result) <= _RESULT_BYTES:
            return {"event": DONE}, result
        refusal = UserError(
            f"expected a job with a result of at most {_RESULT_BYTES} bytes, found more: make it smaller"
        )
    except UserError as error:
        refusal = error
    except Exception as error:
        refusal = UserError(_sentence(error))
    return {"event": REFUSED}, pickle.dumps(refusal)


def _sentence(error: Exception) -> str:
    """Return the first line of an error: torch says there which part of a network cannot run."""
    lines = f"{type(error).__name__}: {error}".splitlines() if str(error) else [type(error).__name__]
    return f"expected a job that can be simulated, found {lines[0][:300]}: change it"


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
