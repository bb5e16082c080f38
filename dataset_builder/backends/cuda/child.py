"""The child process of a measurement: trains one spec and reports on the file descriptor in its last argument.

Each spec has its own process, which imports only torch and the modules that build a network: anything else would be
measured as well. It ends with its parent.
"""

import sys
import traceback
from queue import SimpleQueue
from typing import Any

from vramcast.child.channel import Channel, end_with_parent
from vramcast.child.messages import REFUSED
from vramcast.dataset_builder.backends.cuda.protocol import (
    CONTEXT,
    GO,
    PEAKS,
    ChildResult,
    MeasureRequest,
    is_out_of_memory,
)
from vramcast.errors import UserError
from vramcast.virtual_gpu.measurement import EVIDENCE_LENGTH, Status


def main(report_fd: int) -> int:
    """Run one request and return the exit code."""
    channel = Channel(report_fd)
    end_with_parent()
    request = channel.next_request()
    if request is None:
        return 3  # the parent is gone
    try:
        result = _run(MeasureRequest.from_json(request), channel, channel.inbox(request["parent"]))
    except UserError as error:
        channel.report(REFUSED, reason=str(error))
        return 2
    channel.report(**result.to_json())
    return 0 if result.status is Status.OK else 1


def _run(request: MeasureRequest, channel: Channel, inbox: "SimpleQueue[Any]") -> ChildResult:
    import torch  # noqa: PLC0415 - takes a second, during which the end of the parent must be noticed

    if not torch.cuda.is_available():
        raise UserError(
            f"expected a torch that can use this GPU, found torch {torch.__version__} for CUDA {torch.version.cuda}: "
            "install one for the driver's CUDA, or use backend=virtual, which needs no GPU"
        )
    total_bytes = _create_context(torch, channel, inbox)
    try:
        if request.cap_bytes is not None:
            # one byte more: the product of fraction and total is rounded down
            torch.cuda.set_per_process_memory_fraction(min(1.0, (request.cap_bytes + 1) / total_bytes))
        _train(torch, request)
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        status = Status.OOM if is_out_of_memory(text) else Status.CRASHED
        return _result(torch, status, text[:EVIDENCE_LENGTH])
    return _result(torch, Status.OK)


def _create_context(torch: Any, channel: Channel, inbox: "SimpleQueue[Any]") -> int:
    """Create the context, wait until the parent has read its memory, and return the memory of the device."""
    try:
        _, total_bytes = torch.cuda.mem_get_info()  # the first call that needs a context; it allocates nothing
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"expected a CUDA context on this GPU, found: {reason}; see its mode and errors in nvidia-smi -q"
        ) from error
    channel.report(CONTEXT, uuid=_uuid(torch))
    if inbox.get() != GO:
        sys.exit(3)  # the parent is gone
    return int(total_bytes)


def _train(torch: Any, request: MeasureRequest) -> None:
    from vramcast.dataset_builder.backends.cuda.training_run import training_run  # noqa: PLC0415 - imports torch

    for _ in training_run(request.spec, request.epochs, "cuda"):
        torch.cuda.synchronize()  # so that an error is raised in the step that caused it


def _uuid(torch: Any) -> str | None:
    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)  # since torch 2.5
    return None if uuid is None else str(uuid).removeprefix("GPU-")


def _result(torch: Any, status: Status, evidence: str | None = None) -> ChildResult:
    """Return the peaks that torch counted; after some errors CUDA does not respond any more, and there are none."""
    try:
        stats = torch.cuda.memory_stats()
    except RuntimeError:
        stats = {}
    peaks = {name: stats.get(f"{name}.all.peak") for name in PEAKS}
    versions = {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    retries = stats.get("num_alloc_retries", 0)
    return ChildResult(status=status, **peaks, retries=retries, evidence=evidence, versions=versions)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
