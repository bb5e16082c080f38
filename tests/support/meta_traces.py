"""Traces of small steps on the meta device, in a form that can be checked by hand."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from vramcast.virtual_gpu.operators.attention import efficient_workspace_bytes
from vramcast.virtual_gpu.operators.cuda_paths import cuda_paths
from vramcast.virtual_gpu.operators.kernels import cuda_kernels
from vramcast.virtual_gpu.replay.replay import FREE
from vramcast.virtual_gpu.tracing.trace import AttentionCall, LibraryCall, Trace, Tracer, Use, call_of

HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32


def on_meta(make: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return make()


def numbers(*shape: int, dtype: torch.dtype = SINGLE, grad: bool = False) -> Tensor:
    return torch.randn(shape, device="meta", dtype=dtype).requires_grad_(grad)


def traced(step: Callable[[], Any], *known: Tensor, capability: float = 8.0, phase: Use = Use.ACTIVATIONS) -> Trace:
    """Trace a function, with some tensors allocated before."""
    tracer = Tracer(cuda_kernels())
    tracer.phase = phase
    for item in known:
        tracer.see(item.detach())
    tracer.trace.events.clear()
    with cuda_paths(capability), tracer:
        step()
    return tracer.trace


def told(step: Callable[[], Any], *known: Tensor, capability: float = 8.0) -> list[Any]:
    """Return allocations as positive sizes, frees as negative ones, library calls by name."""
    trace = traced(step, *known, capability=capability)
    story: list[Any] = []
    sizes: dict[int, int] = {}
    for block, size in trace.events:
        index = call_of(size)
        if index is not None:
            call = trace.calls[index]
            if isinstance(call, AttentionCall):
                sizes[block] = efficient_workspace_bytes(call, capability)
                story.append(sizes[block])
            else:
                story.append(call.library if isinstance(call, LibraryCall) else call.direction)
        elif size != FREE:
            sizes[block] = size
            story.append(size)
        elif block in sizes:
            story.append(-sizes[block])
    return [item for item in story if item != 0]


def peak_bytes(trace: Trace) -> int:
    live: dict[int, int] = {}
    peak = 0
    for block, size in trace.events:
        if size == FREE:
            live.pop(block, None)
        else:
            live[block] = max(size, 0)
            peak = max(peak, sum(live.values()))
    return peak


class Recorder(TorchDispatchMode):
    """Return the operators that reach the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def operators(step: Callable[[], Any], capability: float = 8.0) -> list[str]:
    with cuda_paths(capability), Recorder() as recorder:
        step()
    return recorder.names


def transformer() -> nn.Module:
    return nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.Linear(16, 4))
