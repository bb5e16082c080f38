"""Stand-ins for libraries that cannot be installed without CUDA; a run names those that it wants.

A stand-in is only used where the library itself is absent. transformers asks for the version of a library before it
imports it, so a stand-in has metadata as well. Triton's needs no name: it is there as soon as Liger-Kernel is imported,
and not before, because other libraries take other paths where Triton is installed.
"""

import importlib
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from vramcast.errors import check_choice

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.emulation import CudaEmulation

STAND_INS = {"flash_attn": "vramcast.virtual_gpu.cuda.libraries.flash_attn_stand_in"}
"""The module that takes the place of a library and of the modules below it."""
_TRITON = "vramcast.virtual_gpu.cuda.libraries.triton_stand_in"
_TRITON_USER = "liger_kernel"


def install(names: Iterable[str], gpu: "CudaEmulation") -> None:
    """Let a script import stand-ins for those libraries that are absent, until the virtual GPU is left."""
    for name in names:
        check_choice("a stand-in", name, sorted(STAND_INS))
        if not _is_installed(name):
            finder = _Finder(name, importlib.import_module(STAND_INS[name]))
            _find_by(finder, gpu)
            gpu.assumptions.note_once(
                f"{name} is not installed: a stand-in allocates the tensors of release {finder.version}"
            )
    if not _is_installed("triton"):
        _find_by(_Finder("triton", importlib.import_module(_TRITON), user=_TRITON_USER), gpu)


def _find_by(finder: "_Finder", gpu: "CudaEmulation") -> None:
    sys.meta_path.append(finder)
    gpu.callbacks.callback(sys.meta_path.remove, finder)
    gpu.callbacks.callback(_forget, finder.name)


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return name in sys.modules
    return True


def _forget(name: str) -> None:
    for key in [key for key in sys.modules if key.partition(".")[0] == name]:
        del sys.modules[key]


_ALL = DistributionFinder.Context()


class _Metadata(Distribution):
    """The metadata of a stand-in."""

    def __init__(self, name: str, release: str) -> None:
        self._text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n"

    def read_text(self, filename: str) -> str | None:
        """Return the file METADATA, the only one."""
        return self._text if filename == "METADATA" else None

    def locate_file(self, path: object) -> Path:
        """Return the path: there are no files."""
        return Path(str(path))


class _Finder(DistributionFinder, MetaPathFinder, Loader):
    """Finds a library and the modules below it in one module of this package.

    With a `user`, only after the import of that library has begun.
    """

    def __init__(self, name: str, module: ModuleType, user: str | None = None) -> None:
        self.name = name
        self._module = module
        self._user = user
        self.version: str = module.VERSION

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the library and of each module below it."""
        own = fullname.partition(".")[0] == self.name
        return ModuleSpec(fullname, self, is_package=True) if own and self._is_wanted() else None

    def _is_wanted(self) -> bool:
        return self._user is None or self._user in sys.modules

    def find_distributions(self, context: DistributionFinder.Context = _ALL) -> list[Distribution]:
        """Return the metadata where the library is asked for."""
        wanted = (context.name or "").replace("-", "_").lower()
        return [_Metadata(self.name, self.version)] if wanted == self.name and self._is_wanted() else []

    def exec_module(self, module: ModuleType) -> None:
        """Give a module the functions of the stand-in, and its placeholders for all other names."""
        public = {name: value for name, value in vars(self._module).items() if not name.startswith("_")}
        vars(module).update(public, __version__=self.version)
        if "missing" in public:
            vars(module)["__getattr__"] = public["missing"]
