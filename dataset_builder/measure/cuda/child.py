"""The inside of a measurement: `python -m dataset_builder.measure.cuda.child FD` trains one spec and reports on FD.

It is a process of its own for each spec, and imports torch and what builds a network, since whatever else it held would
be in the figures. It ends with its parent.
"""

import json
import os
import signal
import sys
import threading
import traceback
from typing import Any

from vramcast.dataset_builder.child_process import end_with_parent, write_line
from vramcast.dataset_builder.measure.cuda.protocol import (
    CONTEXT,
    GO,
    PEAKS,
    REFUSED,
    Request,
    Result,
    is_out_of_memory,
)
from vramcast.errors import UserError
from vramcast.virtual_gpu.measurement import EVIDENCE_LENGTH, Status


def main(report_fd: int) -> int:
    """Answer one request; the return value is the exit code."""
    end_with_parent()
    os.set_inheritable(report_fd, False)  # a program that is started here must not hold it open
    try:
        result = _run(Request.from_json(json.loads(_read_line())), report_fd)
    except UserError as error:
        write_line(report_fd, {"event": REFUSED, "reason": str(error)})
        return 2
    write_line(report_fd, result.to_json())
    return 0 if result.status is Status.OK else 1


def _read_line() -> bytes:
    """A line from the parent. Not through `sys.stdin`, whose lock a waiting thread holds when the interpreter ends."""
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(0, 1)
        if not data:
            sys.exit(3)  # the parent is gone
        line += data
    return line


def _end_with_input() -> None:
    """End the whole group when the parent goes, which closes this process's input."""
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)


def _run(request: Request, report_fd: int) -> Result:
    import torch  # noqa: PLC0415 - takes a second, in which a parent that goes must be noticed

    if not torch.cuda.is_available():
        raise UserError(
            f"expected a torch that can use this GPU, found torch {torch.__version__} for CUDA {torch.version.cuda}: "
            "install one for the driver's CUDA, or use backend=virtual, which needs no GPU"
        )
    total_bytes = _meet_parent(torch, report_fd)
    try:
        if request.cap_bytes is not None:
            # one byte more, lest the product of fraction and total fall short of the cap
            torch.cuda.set_per_process_memory_fraction(min(1.0, (request.cap_bytes + 1) / total_bytes))
        _train(torch, request)
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        status = Status.OOM if is_out_of_memory(text) else Status.CRASHED
        return _result(torch, status, text[:EVIDENCE_LENGTH])
    return _result(torch, Status.OK)


def _meet_parent(torch: Any, report_fd: int) -> int:
    """Make the context and have the parent look at it; returns the memory that the device has."""
    try:
        _, total_bytes = torch.cuda.mem_get_info()  # the first call that needs a context, and it allocates nothing
    except Exception as error:
        found = " ".join(str(error).split())
        raise UserError(
            f"expected a CUDA context on this GPU, found: {found}; see its mode and errors in nvidia-smi -q"
        ) from error
    write_line(report_fd, {"event": CONTEXT, "uuid": _uuid(torch)})
    if _read_line() != GO:
        raise RuntimeError("the parent said something else than go")
    threading.Thread(target=_end_with_input, daemon=True).start()
    return int(total_bytes)


def _train(torch: Any, request: Request) -> None:
    from vramcast.dataset_builder.measure.cuda.job import run_job  # noqa: PLC0415 - imports torch

    for _ in run_job(request.spec, request.epochs, "cuda"):
        torch.cuda.synchronize()  # an error belongs to the step that made it


def _uuid(torch: Any) -> str | None:
    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)  # not before torch 2.5
    return None if uuid is None else str(uuid).removeprefix("GPU-")


def _result(torch: Any, status: Status, evidence: str | None = None) -> Result:
    """The peaks that torch counted. After some errors CUDA answers nothing more, and there are none."""
    try:
        stats = torch.cuda.memory_stats()
    except RuntimeError:
        stats = {}
    peaks = {name: stats.get(f"{name}.all.peak") for name in PEAKS}
    versions = {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    retries = stats.get("num_alloc_retries", 0)
    return Result(status=status, **peaks, retries=retries, evidence=evidence, versions=versions)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
