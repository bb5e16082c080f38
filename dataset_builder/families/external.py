"""Networks of other libraries, by name. No weights are downloaded; the library is imported when one is built."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import nn

from dataset_builder.errors import UserError
from dataset_builder.plan import InputTensor


def build_external(
    family: str, network: Mapping[str, Any], device: str = "meta"
) -> tuple[nn.Module, tuple[InputTensor, ...]]:
    """The module in training mode, and what it is fed."""
    if family != "timm":
        raise UserError(f"expected the family timm, found {family!r}: choose one that can be built")
    return _build_timm(network["name"], network["num_classes"], device), (InputTensor(tuple(network["input_shape"])),)


def _build_timm(name: str, num_classes: int, device: str) -> nn.Module:
    timm = _import_timm()
    try:
        with torch.device(device):
            subject: nn.Module = timm.create_model(name, pretrained=False, num_classes=num_classes)
    except (NotImplementedError, RuntimeError):
        # some constructors compute with values, which meta tensors do not have
        subject = timm.create_model(name, pretrained=False, num_classes=num_classes).to(device)
    return subject.train()


def _import_timm() -> Any:
    try:
        return import_module("timm")
    except ImportError as error:
        mend = "pip install 'vramcast[timm]'"
        raise UserError(f"expected the library timm for a network of its own, found none: {mend}") from error
