"""safetensors: a file whose tensors have no data is as large as the real one, and full of zeros (safetensors 0.8).

Its data is a hole, which takes no place on the disk. Where files are not protected, no such file is written.
"""

import json
import os
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vramcast.virtual_gpu.cuda.devices import is_meta
from vramcast.virtual_gpu.cuda.hollow_files import MARK
from vramcast.virtual_gpu.cuda.patches import Patches

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.emulation import CudaEmulation


class _Hollow:
    """Tensors without data, in the place of what safetensors makes of tensors."""

    def __init__(self, tensors: dict[str, Tensor], names: dict[Any, str]) -> None:
        self._tensors, self._names = tensors, names

    def header_and_size(self, metadata: dict[str, str] | None) -> tuple[bytes, int]:
        """Return the first bytes of the file, and the number of the others."""
        entries: dict[str, Any] = {"__metadata__": {"vramcast": MARK.decode(), **(metadata or {})}}
        end = 0
        for name, tensor in self._tensors.items():
            start, end = end, end + tensor.nbytes
            entries[name] = {
                "dtype": self._names[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, end],
            }
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text, end


def _apply(module: ModuleType, patches: Patches, gpu: "CudaEmulation") -> None:
    """Replace what save_file calls: other modules may have imported save_file itself before."""
    flatten: Any = module._flatten_as_ptr
    serialize_file: Any = module.serialize_file
    serialize: Any = module.serialize
    names = {dtype: name for name, dtype in module._TYPES.items()}

    def flattened(tensors: Any, *args: Any) -> Any:
        return _Hollow(tensors, names) if any(map(is_meta, tensors.values())) else flatten(tensors, *args)

    def written(tensors: Any, filename: Any, metadata: Any = None, **kwargs: Any) -> Any:
        if not isinstance(tensors, _Hollow):
            return serialize_file(tensors, filename, metadata=metadata, **kwargs)
        if not gpu.files_are_protected:
            gpu.note_unwritten(str(filename))
            return None
        header, size_bytes = tensors.header_and_size(metadata)
        with Path(filename).open("wb") as file:
            file.write(header)
            file.flush()
            os.truncate(file.fileno(), len(header) + size_bytes)
        return None

    def serialized(tensors: Any, metadata: Any = None, **kwargs: Any) -> Any:
        if not isinstance(tensors, _Hollow):
            return serialize(tensors, metadata=metadata, **kwargs)
        header, size_bytes = tensors.header_and_size(metadata)
        return header + bytes(size_bytes)

    patches.set(module, "_flatten_as_ptr", flattened)
    patches.set(module, "serialize_file", written)
    patches.set(module, "serialize", serialized)


PATCHES = {"safetensors.torch": _apply}
