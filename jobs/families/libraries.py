"""Imports of the libraries that networks come from, also where torchvision's compiled operators do not load."""

import re
import sys
from collections.abc import Callable, Sequence
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
        return import_module(name)
    except ImportError as error:
        extra = {"transformers": "hf", "diffusers": "diffusers"}.get(name, "timm")
        raise UserError(
            f"expected the library {name} to be installed, found none: pip install 'vramcast[{extra}]'"
        ) from error


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
