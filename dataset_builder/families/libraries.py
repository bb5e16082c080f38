"""Imports of libraries that subjects come from, also where torchvision's compiled operators do not load."""

import re
import sys
from contextlib import suppress
from importlib import import_module
from types import ModuleType

import torch

from vramcast.errors import UserError

_MISSING_OPERATOR = re.compile(r"operator torchvision::(\w+) does not exist")
_MOST_OPERATORS = 20
_declared = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
"""Lives as long as the declarations in it are to."""


def import_library(name: str) -> ModuleType:
    """The library by its name; timm and transformers want torchvision, which is coped with where it is broken."""
    cope_with_torchvision()
    try:
        return import_module(name)
    except ImportError as error:
        extra = {"transformers": "hf"}.get(name, "timm")
        mend = f"pip install 'vramcast[{extra}]'"
        raise UserError(f"expected the library {name} for a network of its own, found none: {mend}") from error


def cope_with_torchvision() -> None:
    """Import it if it is there, since libraries that find it installed expect that it loads; they do without it too."""
    with suppress(ImportError):
        _import_torchvision()


def _import_torchvision() -> ModuleType:
    """On a build of torch that torchvision's operators are not for, declare those that it stumbles over.

    They are of detectors' last stages and have no memory to speak of; a network that runs one gets torch's own error.
    """
    for _ in range(_MOST_OPERATORS):
        try:
            return import_module("torchvision")
        except RuntimeError as error:
            missing = _MISSING_OPERATOR.search(str(error))
            if missing is None:
                raise ImportError(str(error)) from error
            schema = f"{missing[1]}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor"
            _declared.define(schema)  # type: ignore[no-untyped-call]
            for module in [item for item in sys.modules if item.partition(".")[0] == "torchvision"]:
                del sys.modules[module]
    raise ImportError("torchvision lacks too many operators")
