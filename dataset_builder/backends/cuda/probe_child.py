"""The child process that measures probes: it runs single calls on the GPU and reports the workspace of each.

A call's workspace is the peak of the requested bytes during the call, without what the call returns. The functions need
torch alone; they also run on the virtual GPU that a script sees as CUDA.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vramcast.child.channel import Channel, end_with_parent
from vramcast.child.messages import REFUSED
from vramcast.dataset_builder.backends.cuda.protocol import RESULT
from vramcast.device.calibration.probes import Probe
from vramcast.virtual_gpu.tracing.trace import ConvolutionCall

_DILATION, _NO_OUTPUT_PADDING = [1, 1], [0, 0]


def main(report_fd: int) -> int:
    """Measure the probes of one request and return the exit code."""
    channel = Channel(report_fd)
    end_with_parent()
    request = channel.next_request()
    if request is None:
        return 3  # the parent is gone
    channel.inbox(request["parent"])  # notices its end
    if not torch.cuda.is_available():
        reason = f"expected a torch that can use this GPU, found torch {torch.__version__}: install one for its CUDA"
        channel.report(REFUSED, reason=reason)
        return 2
    values: dict[str, Any] = dict(library_workspaces())
    probes = [Probe(**item).call for item in request["probes"]]
    channel.report(RESULT, **values, workspaces=[convolution_workspace(call) for call in probes])
    return 0


def library_workspaces() -> dict[str, int]:
    """Return the workspaces of cuBLAS, which is held from the first product on, and of cublasLt."""
    a, bias = torch.empty(64, 64, device="cuda"), torch.empty(64, device="cuda")
    held = _peak_beyond_result(lambda: a @ a)
    return {
        "cublas_workspace_bytes": held,
        "cublaslt_workspace_bytes": _peak_beyond_result(lambda: torch.addmm(bias, a, a)),
    }


def convolution_workspace(call: ConvolutionCall) -> int | None:
    """Return the workspace of a convolution; None if the GPU is too small for it."""
    try:
        x, weight, grad = (torch.empty(shape, device="cuda") for shape in (call.x, call.weight, call.y))
        return _peak_beyond_result(lambda: _run(call, x, weight, grad))
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None


def _peak_beyond_result(run: Callable[[], Tensor]) -> int:
    before = _requested("current")
    torch.cuda.reset_peak_memory_stats()
    result = run()
    torch.cuda.synchronize()
    return _requested("peak") - before - result.numel() * result.element_size()


def _requested(kind: str) -> int:
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{kind}"])


def _run(call: ConvolutionCall, x: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
    padding = [side // 2 for side in call.weight[2:]]
    shape: Sequence[Any] = (list(call.stride), padding, _DILATION, False, _NO_OUTPUT_PADDING, call.groups)
    if call.direction == "forward":
        result: Tensor = torch.ops.aten.convolution(x, weight, None, *shape)
        return result
    is_data = call.direction == "data"
    gradients: Sequence[Tensor] = torch.ops.aten.convolution_backward(
        grad, x, weight, None, *shape, [is_data, not is_data, False]
    )
    return gradients[0 if is_data else 1]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
