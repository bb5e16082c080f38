"""Loops of a script: its files are compiled with probes, loaders and optimizers are noted (checked on torch 2.13)."""

import builtins
import functools
from importlib.machinery import SourceFileLoader
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import dataloader

from vramcast.virtual_gpu.cuda.patches import Patches
from vramcast.virtual_gpu.cuda.script_source import COUNT, LOOP, RAN
from vramcast.virtual_gpu.tracing.source_lines import is_users

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.emulation import CudaEmulation


def apply(patches: Patches, gpu: "CudaEmulation") -> None:
    """Follow the loops of the script, so that they can be ended early."""
    _loaders(patches, gpu)
    _optimizers(patches, gpu)
    for name in ("cat", "concat", "concatenate", "stack"):
        patches.set(torch, name, _collecting(getattr(torch, name), gpu))
    patches.set(builtins, LOOP, gpu.forward.loop)
    patches.set(builtins, COUNT, gpu.forward.count)
    patches.set(builtins, RAN, gpu.coverage.ran)
    if gpu.watches_source:
        _user_modules(patches, gpu)


def _loaders(patches: Patches, gpu: "CudaEmulation") -> None:
    iterators: Any = dataloader._BaseDataLoaderIter
    make, iterate = torch.utils.data.DataLoader.__init__, torch.utils.data.DataLoader.__iter__
    real_next = iterators.__next__
    coverage, forward = gpu.coverage, gpu.forward

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        coverage.made_loader(self)

    def iter_(self: Any) -> Any:
        coverage.iterated(self)
        return iterate(self)

    def next_(self: Any) -> Any:
        if forward.ends_loader(self):
            raise StopIteration
        return real_next(self)

    patches.set(torch.utils.data.DataLoader, "__init__", init)
    patches.set(torch.utils.data.DataLoader, "__iter__", iter_)
    patches.set(iterators, "__next__", next_)


def _collecting(original: Any, gpu: "CudaEmulation") -> Any:
    """Enlarge a tensor that is made of all that an evaluation has collected, if the evaluation was ended early."""
    growth = gpu.growth

    @functools.wraps(original)
    def join(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        if growth.seen and gpu.tracer.is_device(out):
            growth.enlarge(args[0] if args else kwargs.get("tensors"), out)
        return out

    return join


def _optimizers(patches: Patches, gpu: "CudaEmulation") -> None:
    make: Any = torch.optim.Optimizer.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        gpu.coverage.made_optimizer(self)

    patches.set(torch.optim.Optimizer, "__init__", init)


def _user_modules(patches: Patches, gpu: "CudaEmulation") -> None:
    """Compile modules of the user with probes, in the place of their cached code."""
    original: Any = SourceFileLoader.get_code

    def get_code(self: Any, fullname: str) -> Any:
        path = self.get_filename(fullname)
        if is_users(path):
            try:
                is_main = fullname in gpu.source.main_modules
                return gpu.source.compiled(self.get_data(path), path, is_main=is_main)
            except (SyntaxError, ValueError, RecursionError):  # Python reports it in its own words
                pass
        return original(self, fullname)

    patches.set(SourceFileLoader, "get_code", get_code)
