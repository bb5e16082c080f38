"""torch.save and torch.load: a checkpoint without data stays in memory, and a file has a mark with its key.

Where files are not protected, a path is not written, and its checkpoint is found by the path (checked on torch 2.13).
"""

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vramcast.virtual_gpu.cuda.devices import META, is_meta, names_cuda
from vramcast.virtual_gpu.cuda.hollow_files import MARK
from vramcast.virtual_gpu.cuda.patches import Patches

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.emulation import CudaEmulation

_KEY_BYTES = 16


def apply(patches: Patches, gpu: "CudaEmulation") -> None:
    """Keep checkpoints of device tensors in this process, by their path."""
    saved = gpu.saved
    real_save, real_load = torch.save, torch.load

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if not has_hollow_data(obj):
            real_save(obj, f, *args, **kwargs)
            return
        if isinstance(f, (str, os.PathLike)) and not gpu.files_are_protected:
            gpu.keep_checkpoint(obj, f)
            return
        key = f"{len(saved):0{_KEY_BYTES}}"
        saved[key] = described(gpu, obj)
        if isinstance(f, (str, os.PathLike)):
            Path(f).write_bytes(MARK + key.encode())
        else:
            f.write(MARK + key.encode())

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        description = _saved_in(saved, f)
        if description is not None:
            return _restored(gpu, description, map_location)
        return real_load(f, _location(gpu, map_location), *args, **kwargs)

    def reduced(original: Any) -> Any:
        def reduce(self: Any) -> Any:
            untyped = getattr(self, "_untyped_storage", self)
            if untyped._cdata not in gpu.tracer._live and untyped._cdata not in gpu.tracer.hollow:
                return original(self)
            buffer = io.BytesIO()
            with gpu.users_meta():
                save(torch.empty(0, dtype=torch.uint8, device=META).set_(untyped), buffer)
            return _storage_of, (buffer.getvalue(), None if untyped is self else self.dtype)

        return reduce

    for kind in (torch.UntypedStorage, torch.TypedStorage):  # pickle reduces a tensor to its storage
        patches.set(kind, "__reduce__", reduced(kind.__reduce__))
    patches.set(torch, "save", save)
    patches.set(torch, "load", load)
    patches.set(torch.serialization, "save", save)
    patches.set(torch.serialization, "load", load)


def has_hollow_data(value: Any, depth: int = 12) -> bool:
    """Return True where a value holds a tensor whose data is not there."""
    if isinstance(value, Tensor):
        return is_meta(value)
    if isinstance(value, nn.Module):
        return any(map(is_meta, (*value.parameters(), *value.buffers())))
    if depth and isinstance(value, dict):
        return any(has_hollow_data(item, depth - 1) for item in value.values())
    if depth and isinstance(value, (list, tuple, set)):
        return any(has_hollow_data(item, depth - 1) for item in value)
    return False


def _storage_of(saved: bytes, dtype: torch.dtype | None) -> Any:
    """Return the storage that pickle has reduced."""
    untyped = torch.load(io.BytesIO(saved)).untyped_storage()
    typed: Any = torch.TypedStorage
    return untyped if dtype is None else typed(wrap_storage=untyped, dtype=dtype, _internal=True)


class _Described:
    """A tensor of a checkpoint: its layout, its device, and its values where they are known."""

    def __init__(self, gpu: "CudaEmulation", tensor: Tensor) -> None:
        self.shape, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.was_device = gpu.tracer.is_device(tensor)
        value = gpu.tracer.values.of(tensor) if is_meta(tensor) else tensor
        self.value = None if value is None else value.clone()

    def tensor(self, gpu: "CudaEmulation", on_device: bool) -> Tensor:
        """Return a tensor like the one that was saved."""
        if self.value is not None:
            return self.value.to(gpu.device) if on_device else self.value.clone()
        if on_device:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=gpu.device)
        with gpu.users_meta():
            bare = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=META)
        return gpu.tracer.adopt_hollow(bare)


def _map(function: Any, value: Any, kind: type) -> Any:
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        copy = type(value)() if type(value).__init__ is dict.__init__ else {}
        copy.update({name: _map(function, item, kind) for name, item in value.items()})
        return copy
    if isinstance(value, list):
        return [_map(function, item, kind) for item in value]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_map(function, item, kind) for item in value)
    return value


def described(gpu: "CudaEmulation", value: Any) -> Any:
    """Return a checkpoint whose tensors are replaced by descriptions, which hold no memory of the device."""
    return _map(lambda tensor: _Described(gpu, tensor), value, Tensor)


def _restored(gpu: "CudaEmulation", value: Any, location: Any) -> Any:
    def restore(item: _Described) -> Tensor:
        on_device = item.was_device if location is None else names_cuda(location)
        return item.tensor(gpu, on_device)

    return _map(restore, value, _Described)


def _saved_in(saved: dict[str, Any], f: Any) -> Any:
    if isinstance(f, (str, os.PathLike)):
        by_path = saved.get(str(Path(f).absolute()))
        if by_path is not None or not Path(f).is_file():
            return by_path
        with Path(f).open("rb") as file:
            return _saved_in(saved, file)
    try:
        start = f.tell()
        content = f.read(len(MARK) + _KEY_BYTES)
        if isinstance(content, bytes) and content.startswith(MARK):
            return saved.get(content.removeprefix(MARK).decode())
        f.seek(start)
    except (AttributeError, OSError):  # nothing that can be sought: torch refuses it in its own words
        return None
    return None


def _location(gpu: "CudaEmulation", location: Any) -> Any:
    """Return a map_location that puts storages on the virtual GPU where the script, or the file, says cuda."""

    def place(storage: torch.UntypedStorage, saved_on: str) -> torch.UntypedStorage:
        target = location(storage, saved_on) if callable(location) else location
        if isinstance(location, dict):
            target = location.get(saved_on, saved_on)
        if isinstance(target, torch.UntypedStorage):
            return target
        return gpu.moved_storage(storage) if names_cuda(saved_on if target is None else target) else storage

    return place
