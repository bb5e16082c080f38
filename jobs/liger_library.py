"""Liger-Kernel on a network of transformers, applied by its own function as the Trainer's use_liger_kernel does.

The library runs on a virtual GPU, where its Triton kernels do nothing (virtual_gpu/cuda/libraries). It replaces
functions and classes in modules of transformers; `liger_kernels` restores them. Checked on Liger-Kernel 0.8.
"""

import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from torch import nn
from torch.nn import functional

from vramcast.errors import UserError
from vramcast.jobs.finetuning.adapters import is_pretrained
from vramcast.virtual_gpu.training.loss_forms import KERNELS, chosen_kernels

INSTALL = "pip install --no-deps liger-kernel"
_PATCHED = ("transformers.models.", "transformers.loss.")
_ABSENT = object()


@contextmanager
def liger_kernels(module: nn.Module | None, kernels: bool | str) -> Iterator[Mapping[str, str]]:
    """Apply Liger's kernels to the network of transformers in a module; yield the release that did it.

    Args:
        module: The network, with or without an adapter; it stays changed.
        kernels: True for those that the library applies by default, else their names or changes of the default.
    """
    release = liger_release()
    network = _network_of(module)
    before = _loaded_attributes()
    try:
        apply = _function_for(network)
        apply(model=network, **_arguments(apply, kernels))
        yield {"liger_kernel": release}
    finally:
        _restore(before)


def liger_release() -> str:
    """Return the installed release of Liger-Kernel."""
    try:
        return version("liger_kernel")
    except PackageNotFoundError as error:
        raise UserError(
            f"expected liger-kernel in the interpreter of the network, found none: {INSTALL}, name an interpreter "
            "that has it by --python, or leave it out by --liger none"
        ) from error


def _network_of(module: nn.Module | None) -> Any:
    parts = module.modules() if module is not None else ()
    for part in parts:
        if is_pretrained(part):
            return part
    raise UserError(
        f"expected a network of transformers beside liger, found {type(module).__name__}: leave it out, or run your "
        "own script by vramcast run"
    )


def _function_for(network: Any) -> Any:
    try:
        patches = importlib.import_module("liger_kernel.transformers.monkey_patch")
    except ImportError as error:
        raise UserError(
            f"expected a liger-kernel that can be imported beside this transformers, found: {error}; install another "
            "release"
        ) from error
    kind = network.config.model_type
    if kind not in patches.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UserError(f"expected a network that Liger has kernels for, found the type {kind}: leave out liger")
    return patches.MODEL_TYPE_TO_APPLY_LIGER_FN[kind]


def _arguments(apply: Any, kernels: bool | str) -> dict[str, bool]:
    """Return the arguments that choose kernels: none for the default ones.

    Changes of the default kernels may name those of other networks, which Liger ignores
    (monkey_patch.py, _apply_liger_kernel_to_instance).
    """
    if not isinstance(kernels, str):
        return {}
    available = [name for name in inspect.signature(apply).parameters if name != "model"]
    from_default, switches = chosen_kernels(kernels)
    switches = {_glu(available) if name == "glu" else name: is_on for name, is_on in switches.items()}
    unknown = sorted(switches.keys() - set(available) - set(KERNELS if from_default else ()))
    if unknown:
        raise UserError(
            f"expected kernels of Liger for this network, {available}, found {unknown}: choose some of these"
        )
    if from_default:
        return {name: is_on for name, is_on in switches.items() if name in available}
    return {name: name in switches for name in available}


def _glu(kernels: list[str]) -> str:
    """Return the name of the gated activation that a network has, which axolotl does not tell apart."""
    return next((name for name in kernels if name in ("swiglu", "geglu")), "swiglu")


def _loaded_attributes() -> list[tuple[Any, dict[str, Any]]]:
    """Return the attributes that Liger may replace: those of loaded modules of transformers, and forwards there."""
    modules = [item for name, item in list(sys.modules.items()) if name.startswith(_PATCHED) and _is_plain(item)]
    classes = {item for module in modules for item in vars(module).values() if isinstance(item, type)}
    owners: list[tuple[Any, dict[str, Any]]] = [(module, dict(vars(module))) for module in modules]
    owners += [(cls, {"forward": vars(cls).get("forward", _ABSENT)}) for cls in classes if issubclass(cls, nn.Module)]
    return [*owners, (functional, {"cross_entropy": functional.cross_entropy})]


def _is_plain(module: Any) -> bool:
    return type(module) is ModuleType  # the others load their attributes when they are asked for


def _restore(before: list[tuple[Any, dict[str, Any]]]) -> None:
    for owner, values in before:
        for name, value in values.items():
            if vars(owner).get(name, _ABSENT) is not value:
                delattr(owner, name) if value is _ABSENT else setattr(owner, name, value)
