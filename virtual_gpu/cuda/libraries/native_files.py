"""Native code that opens files by itself: it is given the path at which a redirected file lies.

Where files are protected by redirection, only functions of Python find the changes of a script. The functions here are
those that many scripts save and load with; other native code finds what is on the disk, and may not write.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vramcast.virtual_gpu.cuda.patches import Patches

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.emulation import CudaEmulation


def _always(*_: Any) -> bool:
    return True


def _never(*_: Any) -> bool:
    return False


@dataclass(frozen=True)
class _Opener:
    """A function or method that opens a file: where its path stands among the arguments, and whether it may write."""

    name: str
    position: int
    keyword: str
    writes: Callable[[tuple[Any, ...], Mapping[str, Any]], bool] = _never
    is_path: Callable[[Any], bool] = _always


def _h5py_writes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    mode = kwargs.get("mode", args[2] if len(args) > 2 else "r")
    return str(mode) != "r"


def _is_sqlite_file(database: Any) -> bool:
    return str(database) not in ("", ":memory:") and not str(database).startswith("file:")


_OPENERS = {
    "torch": (
        _Opener("_C.PyTorchFileWriter", 0, "file_name", _always),
        _Opener("jit.save", 1, "f", _always),
        _Opener("jit.load", 0, "f"),
        _Opener("from_file", 0, "filename", _always),
        _Opener("UntypedStorage.from_file", 0, "filename"),
    ),
    "sqlite3": (
        _Opener("connect", 0, "database", _always, _is_sqlite_file),
        _Opener("dbapi2.connect", 0, "database", _always, _is_sqlite_file),
    ),
    "safetensors": (_Opener("safe_open", 0, "filename"),),
    "safetensors.numpy": (
        _Opener("safe_open", 0, "filename"),
        _Opener("serialize_file", 1, "filename", _always),
    ),
    "safetensors.torch": (
        _Opener("safe_open", 0, "filename"),
        _Opener("serialize_file", 1, "filename", _always),
    ),
    "tokenizers": (_Opener("Tokenizer.save", 1, "path", _always), _Opener("Tokenizer.from_file", 0, "path")),
    "pyarrow": (_Opener("memory_map", 0, "path"),),
    "h5py": (_Opener("File.__init__", 1, "name", _h5py_writes),),
    "subprocess": (_Opener("Popen.__init__", 10, "cwd"),),
}
"""By module. Checked on Python 3.11, torch 2.13, safetensors 0.8, tokenizers 0.23, pyarrow 26 and h5py 3.16."""


def _apply(openers: tuple[_Opener, ...], module: ModuleType, patches: Patches, gpu: "CudaEmulation") -> None:
    if gpu.native_path is None:
        return
    for opener in openers:
        owner_name, _, attribute = opener.name.rpartition(".")
        owner: Any = functools.reduce(getattr, owner_name.split("."), module) if owner_name else module
        located = _located(getattr(owner, attribute), gpu.native_path, opener)
        static = isinstance(inspect.getattr_static(owner, attribute), staticmethod)
        patches.set(owner, attribute, staticmethod(located) if static else located)


def _located(original: Any, native_path: Callable[..., Any], opener: _Opener) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        writes = opener.writes(args, kwargs)
        arguments = list(args)
        if opener.position < len(arguments) and opener.is_path(arguments[opener.position]):
            arguments[opener.position] = native_path(arguments[opener.position], writes=writes)
        elif kwargs.get(opener.keyword) is not None and opener.is_path(kwargs[opener.keyword]):
            kwargs[opener.keyword] = native_path(kwargs[opener.keyword], writes=writes)
        return original(*arguments, **kwargs)

    return call


PATCHES = {name: functools.partial(_apply, openers) for name, openers in _OPENERS.items()}
