"""safetensors: files whose tensors have no data are not written (checked on safetensors 0.8)."""

from types import ModuleType
from typing import TYPE_CHECKING, Any

from vramcast.virtual_gpu.cuda.devices import is_meta
from vramcast.virtual_gpu.cuda.patches import Patches

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.virtual_cuda import VirtualCuda

_HOLLOW = "a file without data"


def _apply(module: ModuleType, patches: Patches, gpu: "VirtualCuda") -> None:
    """Replace what save_file calls: other modules may have imported save_file itself before."""
    flatten: Any = module._flatten_as_ptr
    serialize_file: Any = module.serialize_file
    serialize: Any = module.serialize

    def flattened(tensors: Any, *args: Any) -> Any:
        return _HOLLOW if any(map(is_meta, tensors.values())) else flatten(tensors, *args)

    def written(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        if tensors is _HOLLOW:
            gpu.note_unwritten(str(filename))
            return None
        return serialize_file(tensors, filename, *args, **kwargs)

    def serialized(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return serialize({} if tensors is _HOLLOW else tensors, *args, **kwargs)

    patches.set(module, "_flatten_as_ptr", flattened)
    patches.set(module, "serialize_file", written)
    patches.set(module, "serialize", serialized)


PATCHES = {"safetensors.torch": _apply}
