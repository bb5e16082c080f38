"""nn.Module and nn.Parameter: large parameters have no data on the host, moves and calls are observed (torch 2.13)."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizer_hooks

from vramcast.virtual_gpu.cuda.devices import META, is_meta
from vramcast.virtual_gpu.cuda.patches import Patches
from vramcast.virtual_gpu.cuda.reading import HOLLOW_FROM_ELEMENTS
from vramcast.virtual_gpu.tracing.trace import Use

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.emulation import CudaEmulation


def apply(patches: Patches, gpu: "CudaEmulation") -> None:
    """Empty large parameters of the host, and mark what moves to the device as parameters."""
    _parameters(patches, gpu)
    _moves(patches, gpu)
    _calls(patches, gpu)
    _optimizers(gpu)


def _parameters(patches: Patches, gpu: "CudaEmulation") -> None:
    make = nn.Parameter.__new__

    def new(cls: Any, data: Any = None, requires_grad: bool = True, *args: Any, **kwargs: Any) -> Any:
        if type(data) is Tensor and not is_meta(data) and data.numel() >= HOLLOW_FROM_ELEMENTS and not data.grad_fn:
            with gpu.users_meta():
                bare = torch.empty_strided(data.size(), data.stride(), dtype=data.dtype, device=META)
            data = gpu.tracer.adopt_hollow(bare)
        return make(cls, data, requires_grad, *args, **kwargs)

    patches.set(nn.Parameter, "__new__", new)


def _moves(patches: Patches, gpu: "CudaEmulation") -> None:
    apply_to: Any = nn.Module._apply

    def apply_all(self: nn.Module, function: Any, recurse: bool = True) -> Any:
        before = gpu.tracer.phase
        scripted = dict(self._parameters.items()) if isinstance(self, torch.jit.ScriptModule) else {}
        gpu.tracer.phase = Use.PARAMETERS
        try:
            return apply_to(self, function, recurse)
        finally:
            gpu.tracer.phase = before
            for name, parameter in scripted.items():  # TorchScript holds the tensors apart from their Python objects
                self._parameters[name] = parameter

    real_to: Any = nn.Module.to

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Move a module; a bare number is an ordinal of CUDA, which this build of torch cannot parse."""
        if args and isinstance(args[0], int) and not isinstance(args[0], bool):
            args = (torch.device("cuda", args[0]), *args[1:])
        return real_to(self, *args, **kwargs)

    patches.set(nn.Module, "to", to)
    patches.set(nn.Module, "_apply", apply_all)


def _calls(patches: Patches, gpu: "CudaEmulation") -> None:
    """Observe calls of modules; the global hooks of torch do not see keyword arguments."""
    call: Any = nn.Module.__call__
    record = gpu.record

    def observed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        traces_graph = torch._C._get_tracing_state() is not None  # of torch.jit.trace: sizes are tensors
        if traces_graph or not record.enter_module(self, (args, kwargs)):
            return call(self, *args, **kwargs)
        output = None
        try:
            output = call(self, *args, **kwargs)
            return output
        finally:
            record.leave_module(self, (args, kwargs), output)

    patches.set(nn.Module, "__call__", observed)


def _optimizers(gpu: "CudaEmulation") -> None:
    record = gpu.record
    for handle in (
        optimizer_hooks.register_optimizer_step_pre_hook(record.enter_optimizer),
        optimizer_hooks.register_optimizer_step_post_hook(record.leave_optimizer),
    ):
        gpu.callbacks.callback(handle.remove)
