"""Imports of the libraries that networks come from, also where torchvision's compiled operators do not load."""

import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

import torch

from vramcast.errors import UserError

_MISSING_OPERATOR = re.compile(r"operator torchvision::(\w+) does not exist")
_MAX_OPERATORS = 20
_declared = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
"""Owns the declared operators: they exist as long as this object."""


def import_library(name: str) -> ModuleType:
    """Import timm, transformers or torchvision, or raise a `UserError` that names the extra to install."""
    tolerate_broken_torchvision()
    try:
        return import_module(name)
    except ImportError as error:
        extra = {"transformers": "hf"}.get(name, "timm")
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
    """Finds torchvision where Python does, and replaces its import by one that declares missing operators."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == "torchvision" else None
        if spec is not None and spec.loader is not None:
            execute = partial(_execute, spec.loader.exec_module)
            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


def _execute(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Execute torchvision, and declare each operator whose fake kernel it cannot register (`_meta_registrations`)."""
    for _ in range(_MAX_OPERATORS):
        try:
            return execute(module)
        except RuntimeError as error:
            missing = _MISSING_OPERATOR.search(str(error))
            if missing is None:
                raise ImportError(str(error)) from error
            schema = f"{missing[1]}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor"
            _declared.define(schema)  # type: ignore[no-untyped-call]
            for name in [item for item in sys.modules if item.startswith("torchvision.")]:
                del sys.modules[name]
    raise ImportError("torchvision lacks too many operators")
