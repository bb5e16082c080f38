"""Patches of libraries that scripts use, one module for each; applied when the library is imported, undone on exit.

A module names the library's module that it patches in `PATCHES` and has a function `apply(module, patches, gpu)`.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vramcast.virtual_gpu.cuda.libraries import (
    bitsandbytes_library,
    flex_attention_operator,
    keras_library,
    lightning_devices,
    lightning_io,
    lightning_loops,
    native_files,
    random_operators,
    safetensors_files,
    stand_ins,
    torchvision_operators,
    transformers_generation,
    transformers_models,
    transformers_training,
    triton_kernels,
)
from vramcast.virtual_gpu.cuda.patches import Patches

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.emulation import CudaEmulation

Apply = Callable[[ModuleType, Patches, Any], None]
_LIBRARIES = (
    safetensors_files,
    lightning_devices,
    lightning_io,
    lightning_loops,
    transformers_generation,
    transformers_models,
    transformers_training,
    torchvision_operators,
    bitsandbytes_library,
    keras_library,
    flex_attention_operator,
    triton_kernels,
    native_files,
    random_operators,
)

_UNPATCHED = ("torch._dynamo",)
"""Modules that are imported with torch as it is: the compiler's tables contain functions of torch."""


def apply(patches: Patches, gpu: "CudaEmulation") -> None:
    """Patch the libraries that are imported already, and the others when they are."""
    stand_ins.install(gpu.stand_ins, gpu)
    wanted: dict[str, list[Apply]] = {}
    for part in _LIBRARIES:
        for name, function in part.PATCHES.items():
            wanted.setdefault(name, []).append(function)
    wanted.update({name: [] for name in _UNPATCHED if name not in sys.modules})
    for name in wanted.keys() & sys.modules.keys():
        for function in wanted.pop(name):
            function(sys.modules[name], patches, gpu)
    finder = _Finder(wanted, patches, gpu)
    sys.meta_path.insert(0, finder)
    gpu.callbacks.callback(sys.meta_path.remove, finder)


class _Finder(MetaPathFinder):
    """Finds a module where Python does, and patches it after its import."""

    def __init__(self, wanted: dict[str, list[Apply]], patches: Patches, gpu: Any) -> None:
        self._wanted = wanted
        self._patches = patches
        self._gpu = gpu
        self._searched: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module that is to be patched, None for all others."""
        if fullname not in self._wanted or fullname in self._searched:
            return None
        self._searched.add(fullname)  # so that the other finders answer
        try:
            spec = find_spec(fullname)
        finally:
            self._searched.remove(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with self._patches.lifted() if fullname in _UNPATCHED else nullcontext():
                execute(module)
            for function in self._wanted.pop(fullname, ()):
                function(module, self._patches, self._gpu)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
