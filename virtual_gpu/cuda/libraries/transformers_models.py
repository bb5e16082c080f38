"""transformers: checkpoints of the Trainer go to a scratch directory, a folder with a config alone gives weights.

Checked on transformers 5.22.
"""

import tempfile
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from vramcast.virtual_gpu.cuda.devices import META
from vramcast.virtual_gpu.cuda.patches import Patches

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.emulation import CudaEmulation

_WEIGHTS = ("*.safetensors", "*.bin", "*.safetensors.index.json", "*.bin.index.json", "*.gguf", "*.h5", "*.msgpack")


def _apply_trainer(module: ModuleType, patches: Patches, gpu: "CudaEmulation") -> None:
    """Let checkpoints, and the removal of old ones, happen beside the script's own directory."""
    if gpu.files_are_protected:
        return
    scratch: list[str] = []

    def output_dir(self: Any, trial: Any = None) -> str:
        if not scratch:
            directory = tempfile.TemporaryDirectory(prefix="vramcast-")
            gpu.callbacks.callback(directory.cleanup)
            scratch.append(directory.name)
            gpu.note_unwritten(f"{self.args.output_dir}/checkpoint-*")
        return scratch[0]

    patches.set(module.Trainer, "_get_output_dir", output_dir)


def _apply_models(module: ModuleType, patches: Patches, gpu: "CudaEmulation") -> None:
    """Give a network that has no weights on disk weights without data."""
    model_class: Any = module.PreTrainedModel
    original: Any = vars(model_class)["from_pretrained"].__func__

    def from_pretrained(cls: Any, /, name: Any = None, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        folder = Path(str(name)) if name is not None else None
        if folder is None or not _has_config_alone(folder) or kwargs.get("state_dict") is not None:
            return original(cls, name, *args, config=config, **kwargs)
        gpu.assumptions.note(f"{name} has no weights: they are taken to be there")
        if config is None:
            config = cls.config_class.from_pretrained(name)
        weights = _weights(cls, config, kwargs, gpu)
        network = original(cls, None, *args, config=config, state_dict=weights, **kwargs)
        network.config.name_or_path = network.name_or_path = str(name)  # the same call may be made again by this name
        return network

    patches.set(model_class, "from_pretrained", classmethod(from_pretrained))


def _has_config_alone(folder: Path) -> bool:
    return (folder / "config.json").is_file() and not any(next(folder.glob(name), None) for name in _WEIGHTS)


def _weights(cls: Any, config: Any, kwargs: dict[str, Any], gpu: "CudaEmulation") -> dict[str, Any]:
    """Return a state dict without data in the dtype of the checkpoint."""
    wanted = kwargs.get("dtype", kwargs.get("torch_dtype"))
    saved = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    dtype = wanted if isinstance(wanted, torch.dtype) else saved
    dtype = getattr(torch, dtype) if isinstance(dtype, str) and dtype != "auto" else dtype
    with torch.device("meta"):
        skeleton = cls(config)
    skeleton.tie_weights()
    weights = {}
    for name, value in _stored(skeleton.state_dict()).items():
        kind = dtype if isinstance(dtype, torch.dtype) and value.is_floating_point() else value.dtype
        with gpu.users_meta():
            bare = torch.empty(value.shape, dtype=kind, device=META)
        weights[name] = gpu.tracer.adopt_hollow(bare)
    return weights


def _stored(state: dict[str, Any]) -> dict[str, Any]:
    """Return each weight once, as checkpoints do: tied ones are the same tensor under several names."""
    first: dict[int, str] = {}
    for name, value in state.items():
        first.setdefault(value.untyped_storage()._cdata, name)
    return {name: state[name] for name in first.values()}


PATCHES = {"transformers.trainer": _apply_trainer, "transformers.modeling_utils": _apply_models}
