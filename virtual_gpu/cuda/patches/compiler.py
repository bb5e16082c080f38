"""torch.compile in a script: the real one, whose backend is ours (checked on torch 2.13)."""

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vramcast.errors import UserError
from vramcast.virtual_gpu.compiled.releases import is_supported, unknown_release
from vramcast.virtual_gpu.cuda.patches import Patches

if TYPE_CHECKING:
    from vramcast.virtual_gpu.compiled.session import CompileSession
    from vramcast.virtual_gpu.cuda.emulation import CudaEmulation

_COMPILED_BY_TORCH = ("_flex_attention_hop_wrapper",)
"""Functions that torch itself compiles to check them, with a backend that runs eagerly."""
_OTHERS = ("eager", "aot_eager", "aot_eager_decomp_partition")
"""Backends of torch that run a graph operator by operator."""
_POOLED = ("reduce-overhead", "max-autotune")
"""Modes with CUDA graphs."""
_GRAPHS = (
    "CUDA graphs of torch.compile are simulated by a private pool of memory; the copies of static inputs and the "
    "warm-up are not modelled"
)
_AUTOTUNED = "kernels that max-autotune would choose are not tried: their workspaces are not modelled"
_OPTIMIZER = "torch.compile of the optimizer's step is simulated as eager code, which takes temporaries that it saves"


def apply(patches: Patches, gpu: "CudaEmulation") -> None:
    """Replace torch.compile; `nn.Module.compile` calls it."""
    real = torch.compile
    sessions: list[CompileSession] = []

    def session() -> "CompileSession":
        if not sessions:
            from vramcast.virtual_gpu.compiled.session import CompileSession  # noqa: PLC0415 - needs Dynamo

            sessions.append(gpu.callbacks.enter_context(CompileSession(gpu.tracer, patches, gpu.device)))
            gpu.compile_notes = sessions[0].notes
        return sessions[0]

    gpu.compiler = session

    def compile_(model: Any = None, **kwargs: Any) -> Any:
        if model is None:
            return functools.partial(compile_, **kwargs)
        if getattr(model, "__name__", "") in _COMPILED_BY_TORCH or kwargs.get("disable"):
            return model
        if not is_supported():
            return _eager(gpu, model, unknown_release())
        if isinstance(getattr(model, "__self__", None), torch.optim.Optimizer):
            return _eager(gpu, model, _OPTIMIZER)
        backend = kwargs.pop("backend", "inductor")
        if backend == "inductor":
            pooled = _uses_graphs(gpu, kwargs)
            return session().compiled(model, pooled=pooled, **kwargs)
        if not callable(backend) and backend not in _OTHERS:
            raise UserError(
                f"expected the backend inductor of torch.compile, {', '.join(_OTHERS)} or a function, found "
                f"{backend!r}, whose memory is not modelled: run this script without it"
            )
        with session().lifted():
            return real(model, backend=backend, **kwargs)

    patches.set(torch, "compile", compile_)


def _uses_graphs(gpu: "CudaEmulation", kwargs: dict[str, Any]) -> bool:
    """Return whether compiled code runs in CUDA graphs; drop what is meant for Inductor's kernels."""
    mode, options = kwargs.pop("mode", None), kwargs.pop("options", None) or {}
    pooled = mode in _POOLED or bool(options.get("triton.cudagraphs"))
    if pooled:
        gpu.assumptions.note_once(_GRAPHS)
    if (mode or "").startswith("max-autotune"):
        gpu.assumptions.note_once(_AUTOTUNED)
    return pooled


def _eager(gpu: "CudaEmulation", function: Any, note: str) -> Any:
    """Return a function that runs as eager code and says so."""
    if isinstance(function, nn.Module):
        gpu.assumptions.note(note)
        gpu.compiled.add(function)
        return function

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:  # a library may compile functions that a script never calls
        gpu.assumptions.note(note)
        gpu.compiled_calls += 1
        try:
            return function(*args, **kwargs)
        finally:
            gpu.compiled_calls -= 1

    return called
