"""Native code that opens files by itself: it is given the path at which a redirected file lies.

Where files are protected by redirection, only functions of Python find the changes of a script. The functions here are
those that many scripts save and load with; other native code finds what is on the disk, and may not write.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vramcast.virtual_gpu.cuda.patches import Patches

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.virtual_cuda import VirtualCuda


def _patching(*functions: tuple[str, int, bool]) -> Callable[[ModuleType, Patches, "VirtualCuda"], None]:
    """Return a patch of functions or methods: the name, the position of the path, and whether it may be written."""

    def apply(module: ModuleType, patches: Patches, gpu: "VirtualCuda") -> None:
        if gpu.native_path is None:
            return
        for name, position, writes in functions:
            owner_name, _, attribute = name.rpartition(".")
            owner: Any = getattr(module, owner_name) if owner_name else module
            patches.set(owner, attribute, _located(getattr(owner, attribute), gpu.native_path, position, writes))

    return apply


def _located(original: Any, native_path: Callable[..., Any], position: int, writes: bool) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = list(args)
        if position < len(arguments):
            arguments[position] = native_path(arguments[position], writes=writes)
        return original(*arguments, **kwargs)

    return call


PATCHES = {
    "torch": _patching(("_C.PyTorchFileWriter", 0, True), ("jit.save", 1, True), ("jit.load", 0, False)),
    "sqlite3": _patching(("connect", 0, True), ("dbapi2.connect", 0, True)),
    "safetensors": _patching(("safe_open", 0, False)),
    "safetensors.numpy": _patching(("safe_open", 0, False), ("serialize_file", 1, True)),
    "safetensors.torch": _patching(("safe_open", 0, False), ("serialize_file", 1, True)),
    "tokenizers": _patching(("Tokenizer.save", 1, True), ("Tokenizer.from_file", 0, False)),
    "pyarrow": _patching(("memory_map", 0, False)),
    "h5py": _patching(("File.__init__", 1, True)),
}
"""Checked on torch 2.13, safetensors 0.8, tokenizers 0.23, pyarrow 26 and h5py 3.16."""
