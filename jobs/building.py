"""Build the job of a target: import the user's file or module and call the factory on the meta device."""

import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from vramcast.errors import UserError, suggestion
from vramcast.jobs.architectures import find_architecture
from vramcast.jobs.batches import MakeBatch, resized
from vramcast.jobs.diffusion_architectures import find_denoiser
from vramcast.jobs.families.diffusion import denoising_step
from vramcast.jobs.families.external import build_external
from vramcast.jobs.families.keyword_inputs import KeywordInputs
from vramcast.jobs.families.libraries import import_library, tolerate_broken_torchvision
from vramcast.jobs.families.meta_device import build_on_meta
from vramcast.jobs.job import ModuleJob
from vramcast.jobs.keras_networks import keras_input, keras_step
from vramcast.jobs.optimizers import single_optimizer
from vramcast.jobs.plan import InputTensor
from vramcast.jobs.steps import TrainingStep, trainer_step
from vramcast.jobs.targets import BuildRequest, Target, is_file, parse_shape
from vramcast.virtual_gpu.tracing.owners import is_keras
from vramcast.virtual_gpu.training.step import random_inputs

_SEQUENCE = 512
"""Default sequence length of language models."""


def build_job(request: BuildRequest) -> ModuleJob:
    """Return the job that a request describes."""
    for name in ("packed", "keep_output"):
        if getattr(request, name) and request.target.kind != "hf":
            raise UserError(f"expected {name} beside an hf: target, found {request.target.text}: leave it out")
    if request.target.kind in _LIBRARIES:
        return _library_job(request)
    tolerate_broken_torchvision()  # user code may import it at any time, if only through another library
    place = _import(request.target)
    factory = _attribute(place, request.target.factory, request.target)
    make = partial(_call_factory, factory, request.arguments)
    module = build_on_meta(make)
    if is_keras(module):
        return _keras_job(request, place, module, make)
    step = None if request.step_factory is None else _attribute(place, request.step_factory, request.target)
    if step is None and _is_lightning(module):
        return ModuleJob(module, _lightning_batch(request, place, module), _lightning_step, _configured)
    return ModuleJob(module, _batches(request, place, module), step)


def _import(target: Target) -> ModuleType:
    """Import a user's file or module, whose directory comes first on the path."""
    if target.kind == "module":
        try:
            return importlib.import_module(target.name)
        except ModuleNotFoundError as error:
            if error.name and target.name.startswith(error.name):
                raise UserError(
                    f"expected a module {target.name} that can be imported from here, found none: check the name, "
                    "or run vramcast in its directory"
                ) from error
            raise
    path = Path(target.name)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UserError(f"expected a Python file, found {path}: name another")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look modules up there
    spec.loader.exec_module(module)
    return module


def _attribute(place: ModuleType, name: str, target: Target) -> Any:
    if not hasattr(place, name):
        raise UserError(f"expected {name} in {target.name}, found {_factories(place)}: name one of these")
    return getattr(place, name)


def _factories(place: ModuleType) -> list[str]:
    """Return the names in a module that can stand for a network: its functions, classes and instances."""
    public = {name: value for name, value in vars(place).items() if not name.startswith("_")}
    own = {name for name, value in public.items() if getattr(value, "__module__", None) == place.__name__}
    return sorted(
        name
        for name, value in public.items()
        if isinstance(value, nn.Module)
        or (name in own and (inspect.isfunction(value) or (isinstance(value, type) and issubclass(value, nn.Module))))
    )


def _call_factory(factory: Any, arguments: Mapping[str, Any]) -> nn.Module:
    if isinstance(factory, nn.Module):
        if arguments:
            raise UserError(f"expected no --arg beside a network instance, found {dict(arguments)}: drop them")
        return factory
    if not callable(factory):
        raise UserError(f"expected a function or class that returns a network, found {factory!r}: name another")
    _check_call(factory, arguments)
    module: nn.Module = factory(**arguments)
    return module


def _check_call(factory: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise if the arguments do not match the signature: an error of the command, not of the network."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # not written in Python
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        name = getattr(factory, "__name__", repr(factory))
        raise UserError(f"expected arguments of {name}{signature}, found: {error}; change --arg") from error


def _batches(request: BuildRequest, place: ModuleType | None, module: nn.Module) -> MakeBatch:
    """Return batches from the user's function, from shapes, or from an example that the module carries."""
    if request.inputs_factory is not None and place is not None:
        make: MakeBatch = _attribute(place, request.inputs_factory, request.target)
        return make
    if request.inputs:
        return partial(_random_batch, [InputTensor(*parse_shape(item)) for item in request.inputs])
    example = getattr(module, "example_input_array", None)  # Lightning
    if example is not None:
        return resized(example)[0]
    shape = getattr(module, "pretrained_cfg", {}).get("input_size")  # timm
    if shape is not None:
        return partial(_random_batch, [InputTensor(tuple(shape))])
    raise UserError(
        f"expected the input shape of {type(module).__name__}, found none: give --input SHAPE, without the batch, "
        "or --inputs FUNCTION, which returns a batch for a batch size"
    )


def _random_batch(inputs: list[InputTensor], size: int) -> Any:
    tensors = random_inputs([(item.shape, item.vocabulary) for item in inputs], size, "fp32", "meta")
    return tensors if len(tensors) > 1 else tensors[0]


def _keras_job(request: BuildRequest, place: ModuleType, module: nn.Module, make: Callable[[], nn.Module]) -> ModuleJob:
    step: Any = keras_step
    if request.step_factory is not None:
        step = _attribute(place, request.step_factory, request.target)
    shape = None if request.inputs or request.inputs_factory else keras_input(module)
    batches = _batches(request, place, module) if shape is None else partial(_random_batch, [InputTensor(shape)])
    return ModuleJob(module, batches, step, rebuild=make)


def _is_lightning(module: nn.Module) -> bool:
    """Check by methods, because Lightning is imported under several names."""
    own = getattr(type(module), "training_step", None)
    return callable(own) and callable(getattr(module, "configure_optimizers", None))


def _lightning_step(module: nn.Module, batch: Any) -> Tensor:
    if not getattr(module, "automatic_optimization", True):
        raise UserError("expected a training_step that returns a loss, found manual optimization: give --step FUNCTION")
    step: Any = module.training_step
    loss: Tensor = step(batch, 0)
    return loss


def _lightning_batch(request: BuildRequest, place: ModuleType, module: nn.Module) -> MakeBatch:
    """Return batches as a data loader gives them: a single input is paired with one label for each sample."""
    make = _batches(request, place, module)
    if request.inputs_factory is not None or len(request.inputs) > 1:
        return make
    return lambda size: (make(size), torch.zeros(size, dtype=torch.long, device="meta"))


def _configured(module: nn.Module) -> torch.optim.Optimizer:
    configure: Any = module.configure_optimizers
    return single_optimizer(configure())


def _library_job(request: BuildRequest) -> ModuleJob:
    kind = request.target.kind
    if request.inputs_factory or request.step_factory or len(request.inputs) > 1:
        raise UserError(
            f"expected at most one --input beside {request.target.text}, neither --inputs nor --step, found others: "
            "write a function that returns the network, and name path/to/file.py:function"
        )
    network = _LIBRARIES[kind](request)
    module, inputs = build_external(kind, network)
    step = None if kind == "hf" and request.keep_output else _STEPS.get(kind)
    job = ModuleJob(module, partial(_random_batch, list(inputs)), step, family=kind)
    names = module.names if isinstance(module, KeywordInputs) else ()
    job.masks = frozenset(place for place, name in enumerate(names) if name == "attention_mask")
    return job


def _input_shape(request: BuildRequest) -> tuple[int, ...] | None:
    return parse_shape(request.inputs[0])[0] if request.inputs else None


def _timm(request: BuildRequest) -> dict[str, Any]:
    name, arguments = request.target.name, dict(request.arguments)
    timm = import_library("timm")
    if not timm.is_model(name):
        raise UserError(f"expected a network of timm, found {name!r}: {_suggestion(name, timm.list_models())}")
    config = timm.get_pretrained_cfg(name)  # metadata only, no weights
    shape = _input_shape(request) or (config.input_size if config else (3, 224, 224))
    classes = arguments.pop("num_classes", None) or (config.num_classes if config else 0) or 1000
    return {"name": name, "input_shape": list(shape), "num_classes": classes, "arguments": arguments}


def _suggestion(name: str, names: Sequence[str]) -> str:
    """Return the end of an error about a name that a library does not have."""
    return suggestion(name, names, f"choose one of its {len(names)}")


def _torchvision(request: BuildRequest) -> dict[str, Any]:
    arguments, name = dict(request.arguments), request.target.name
    names = import_library("torchvision").models.list_models()
    if name not in names:
        raise UserError(f"expected a network of torchvision, found {name!r}: {_suggestion(name, names)}")
    shape = _input_shape(request) or ((3, 299, 299) if "inception" in name else (3, 224, 224))
    classes = arguments.pop("num_classes", 1000)
    return {"name": name, "input_shape": list(shape), "num_classes": classes, "arguments": arguments}


def _hugging_face(request: BuildRequest) -> dict[str, Any]:
    """Return the architecture with sizes from a config.json or the built-in table; arguments override settings."""
    name, shape = request.target.name, _input_shape(request)
    path = _config_path(name)
    architecture, sizes = find_architecture(name) if path is None else _read_config(path)
    network: dict[str, Any] = {"architecture": architecture, "config": {**sizes, **request.arguments}}
    network["mask"] = False if request.packed else "padding"
    if shape is not None and len(shape) == 3:
        network["image_size"] = list(shape[1:])
    sequence = (shape or (None,))[-1] if shape is None or len(shape) == 1 else None
    is_speech = architecture.startswith("Whisper")
    return {**network, "sequence": sequence if is_speech else sequence or _SEQUENCE}


def _diffusers(request: BuildRequest) -> dict[str, Any]:
    """Return a denoising network with settings as for transformers; an input is the shape of the latents."""
    name, shape = request.target.name, _input_shape(request)
    if shape is not None and len(shape) != 3:
        raise UserError(f"expected the latents as --input CHANNELS,HEIGHT,WIDTH, found {shape}: write them like that")
    path = _config_path(name)
    architecture, settings = find_denoiser(name) if path is None else _read_config(path)
    return {"architecture": architecture, "config": {**settings, **request.arguments}, "latents": list(shape or ())}


def _config_path(name: str) -> Path | None:
    folder = Path(name) / "config.json"
    return folder if is_file(folder) else Path(name) if name.endswith(".json") else None


def _read_config(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"expected the config.json of a network at {path}, found: {error}; check the path") from error
    named = config.get("architectures") if isinstance(config, dict) else None
    if isinstance(config, dict) and "_class_name" in config:  # diffusers
        return config["_class_name"], {key: value for key, value in config.items() if not key.startswith("_")}
    if not named:
        raise UserError(f"expected 'architectures' in {path}, found none: add the class, as in [\"LlamaForCausalLM\"]")
    return named[0], {key: value for key, value in config.items() if key not in ("architectures", "model_type")}


_LIBRARIES: Mapping[str, Callable[[BuildRequest], dict[str, Any]]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "hf": _hugging_face,
    "diffusers": _diffusers,
}
_STEPS: Mapping[str, TrainingStep] = {"hf": trainer_step, "diffusers": denoising_step}
