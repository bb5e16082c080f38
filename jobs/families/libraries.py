"""Imports of the libraries that networks come from, also where torchvision's compiled operators do not load."""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

from vramcast.errors import UserError
from vramcast.virtual_gpu.operators.autocast import replaced

_MISSING_OPERATOR = re.compile(r"operator torchvision::\w+ does not exist")


def import_library(name: str) -> ModuleType:
    """Import timm, transformers, diffusers or torchvision, or raise a `UserError` that names the extra to install."""
    tolerate_broken_torchvision()
    try:
        if name == "timm" and name not in sys.modules:
            with _lean_timm():
                return import_module(name)
        return import_module(name)
    except ImportError as error:
        extra = {"transformers": "hf", "diffusers": "diffusers"}.get(name, "timm")
        raise UserError(
            f"expected the library {name} to be installed, found none: pip install 'vramcast[{extra}]'"
        ) from error


@contextmanager
def _lean_timm() -> Iterator[None]:
    """Import timm (1.0) without what building an untrained network does not need: two thirds of the time.

    These are the client of Hugging Face's hub, torch's compiler, which one function is hidden from, and the packages of
    torchvision around the few modules that timm names. Later imports of torchvision are complete.
    """
    shells = _TorchvisionShells()
    absent: dict[str, Any] = {} if "huggingface_hub" in sys.modules else {"huggingface_hub": None}  # None fails
    uncompiled = nullcontext() if "torch._dynamo" in sys.modules else replaced(torch.compiler, "disable", _as_it_is)
    had_torchvision = "torchvision" in sys.modules
    sys.modules.update(absent)
    sys.meta_path.insert(0, shells)
    try:
        with uncompiled:
            yield
    finally:
        sys.meta_path.remove(shells)
        for name in [*absent, *(item for item in sys.modules if not had_torchvision and _is_torchvision(item))]:
            del sys.modules[name]


def _as_it_is(function: Any = None, *_: Any, **__: Any) -> Any:
    return _as_it_is if function is None else function


def _execute_nothing(module: ModuleType) -> None:
    pass


def _is_torchvision(name: str) -> bool:
    return name.partition(".")[0] == "torchvision"


class _TorchvisionShells(MetaPathFinder):
    """Finds packages of torchvision whose modules can be imported, without running the packages themselves."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        names = ("torchvision", "torchvision.ops", "torchvision.models")
        spec = PathFinder.find_spec(fullname, path) if fullname in names else None
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = _execute_nothing  # type: ignore[method-assign]
        return spec


def tolerate_broken_torchvision() -> None:
    """Let every later import of torchvision succeed, even if its compiled operators do not match torch.

    timm, transformers and torchmetrics import torchvision wherever it is installed, but need none of its operators.
    Code that calls an operator still gets torchvision's own error.
    """
    if not any(isinstance(finder, _TorchvisionFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TorchvisionFinder())


class _TorchvisionFinder(MetaPathFinder):
    """Finds torchvision where Python does, and replaces its import by one that tolerates missing operators."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == "torchvision" else None
        if spec is not None and spec.loader is not None:
            execute = partial(_execute, spec.loader.exec_module)
            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


def _execute(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Execute torchvision without the fake kernels of operators that it lacks (`torchvision/_meta_registrations.py`).

    Checked with torch 2.6 and 2.13.
    """
    try:
        with replaced(torch.library, "register_fake", partial(_register_fake, torch.library.register_fake)):
            execute(module)
    except RuntimeError as error:  # libraries do without torchvision if it cannot be imported
        raise ImportError(str(error)) from error


def _register_fake(register: Callable[..., Any], operator: Any, function: Any = None, /, **options: Any) -> Any:
    """Do what `torch.library.register_fake` does, and skip operators of torchvision that are missing."""
    if function is None:
        return partial(_register_fake, register, operator, **options)
    try:
        return register(operator, function, **options)
    except RuntimeError as error:
        if not _MISSING_OPERATOR.search(str(error)):
            raise
        return function
