"""From what a user names to a job: his file or package is imported, his factory called, on the meta device."""

import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from vramcast.dataset_builder.families.external import build_external
from vramcast.dataset_builder.families.libraries import import_library, tolerate_broken_torchvision
from vramcast.dataset_builder.families.meta_device import build_on_meta
from vramcast.dataset_builder.jobs.architectures import known_architecture
from vramcast.dataset_builder.jobs.batches import MakeBatch, resized
from vramcast.dataset_builder.jobs.job import ModuleJob
from vramcast.dataset_builder.jobs.optimizers import optimizer_of
from vramcast.dataset_builder.jobs.targets import Target, Wanted, parse_shape
from vramcast.dataset_builder.plan import InputTensor
from vramcast.errors import UserError
from vramcast.virtual_gpu.training_step import random_inputs

_SEQUENCE = 512
"""Tokens of a text, where nobody says how many."""


def build_job(wanted: Wanted) -> ModuleJob:
    """The job that somebody wants inspected."""
    if wanted.target.kind in _LIBRARIES:
        return _of_library(wanted)
    tolerate_broken_torchvision()  # which user code may import at any time, if only through another library
    place = _import(wanted.target)
    factory = _attribute(place, wanted.target.factory, wanted.target)
    module = build_on_meta(partial(_made, factory, wanted.arguments))
    step = None if wanted.step_factory is None else _attribute(place, wanted.step_factory, wanted.target)
    if step is None and _is_lightning(module):
        return ModuleJob(module, _lightning_batch(wanted, place, module), _lightning_step, _configured)
    return ModuleJob(module, _batches(wanted, place, module), step)


def _import(target: Target) -> ModuleType:
    """A user's file or module; its directory comes first on the path."""
    if target.kind == "module":
        try:
            return importlib.import_module(target.name)
        except ModuleNotFoundError as error:
            if error.name and target.name.startswith(error.name):
                raise UserError(
                    f"expected a module {target.name} that can be imported from here, found none: check the name, "
                    "or run vramcast where it lies"
                ) from error
            raise
    path = Path(target.name)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UserError(f"expected a Python file, found {path}: name another")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickles look for their module there
    spec.loader.exec_module(module)
    return module


def _attribute(place: ModuleType, name: str, target: Target) -> Any:
    if not hasattr(place, name):
        there = sorted(item for item, value in vars(place).items() if callable(value) and not item.startswith("_"))
        raise UserError(f"expected {name} in {target.name}, found {there}: name one of these")
    return getattr(place, name)


def _made(factory: Any, arguments: Mapping[str, Any]) -> nn.Module:
    if isinstance(factory, nn.Module):
        if arguments:
            raise UserError(f"expected no --arg for a network that is made already, found {dict(arguments)}: drop them")
        return factory
    if not callable(factory):
        raise UserError(f"expected a function or class that makes a network, found {factory!r}: name another")
    _check_call(factory, arguments)
    found: nn.Module = factory(**arguments)
    return found


def _check_call(factory: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Arguments that are too many or too few are a slip in the command, no fault of the network's code."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # of a function that is not written in Python
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        name = getattr(factory, "__name__", repr(factory))
        raise UserError(f"expected arguments of {name}{signature}, found: {error}; change --arg") from error


def _batches(wanted: Wanted, place: ModuleType | None, module: nn.Module) -> MakeBatch:
    """Batches by the user's function, by the shapes that he gives, or by what the module says of itself."""
    if wanted.inputs_factory is not None and place is not None:
        found: MakeBatch = _attribute(place, wanted.inputs_factory, wanted.target)
        return found
    if wanted.inputs:
        return partial(_random_batch, [InputTensor(*parse_shape(item)) for item in wanted.inputs])
    example = getattr(module, "example_input_array", None)  # Lightning
    if example is not None:
        return resized(example)[0]
    shape = getattr(module, "pretrained_cfg", {}).get("input_size")  # timm
    if shape is not None:
        return partial(_random_batch, [InputTensor(tuple(shape))])
    raise UserError(
        f"expected to know what {type(module).__name__} is fed, found nothing that says so: give --input SHAPE, "
        "without the batch, or --inputs FUNCTION, which makes a batch of a size"
    )


def _random_batch(inputs: list[InputTensor], size: int) -> Any:
    made = random_inputs([(item.shape, item.vocabulary) for item in inputs], size, "fp32", "meta")
    return made if len(made) > 1 else made[0]


def _is_lightning(module: nn.Module) -> bool:
    """By what it can do: whoever writes a LightningModule has imported it under one of several names."""
    own = getattr(type(module), "training_step", None)
    return callable(own) and callable(getattr(module, "configure_optimizers", None))


def _lightning_step(module: nn.Module, batch: Any) -> Tensor:
    if not getattr(module, "automatic_optimization", True):
        raise UserError("expected a training_step that returns a loss, found manual optimization: give --step FUNCTION")
    step: Any = module.training_step
    found: Tensor = step(batch, 0)
    return found


def _lightning_batch(wanted: Wanted, place: ModuleType, module: nn.Module) -> MakeBatch:
    """What a loader would give; beside an input alone there are labels, one for each sample."""
    make = _batches(wanted, place, module)
    if wanted.inputs_factory is not None or len(wanted.inputs) > 1:
        return make
    return lambda size: (make(size), torch.zeros(size, dtype=torch.long, device="meta"))


def _configured(module: nn.Module) -> torch.optim.Optimizer:
    configure: Any = module.configure_optimizers
    return optimizer_of(configure())


def _of_library(wanted: Wanted) -> ModuleJob:
    kind = wanted.target.kind
    if wanted.inputs_factory or wanted.step_factory or len(wanted.inputs) > 1:
        raise UserError(
            f"expected at most one --input beside {wanted.target.text}, and neither --inputs nor --step, found others: "
            "write a function that returns the network, and name it as path/to/file.py:function"
        )
    network = _LIBRARIES[kind](wanted)
    module, inputs = build_external(kind, network)
    return ModuleJob(module, partial(_random_batch, list(inputs)), family=kind)


def _shape_asked(wanted: Wanted) -> tuple[int, ...] | None:
    return parse_shape(wanted.inputs[0])[0] if wanted.inputs else None


def _timm(wanted: Wanted) -> dict[str, Any]:
    name, arguments = wanted.target.name, dict(wanted.arguments)
    timm = import_library("timm")
    if not timm.is_model(name):
        raise UserError(f"expected a network of timm, found {name!r}: {_nearest(name, timm.list_models())}")
    config = timm.get_pretrained_cfg(name)  # what is known of it, without its weights
    shape = _shape_asked(wanted) or (config.input_size if config else (3, 224, 224))
    classes = arguments.pop("num_classes", None) or (config.num_classes if config else 0) or 1000
    return {"name": name, "input_shape": list(shape), "num_classes": classes, "arguments": arguments}


def _nearest(name: str, known: Sequence[str]) -> str:
    """What to do about a name that a library does not know."""
    near = [item for item in known if name in item][:5] or get_close_matches(name, known, n=5)
    return f"choose one such as {near}" if near else f"choose one of its {len(known)}"


def _torchvision(wanted: Wanted) -> dict[str, Any]:
    arguments, name = dict(wanted.arguments), wanted.target.name
    known = import_library("torchvision").models.list_models()
    if name not in known:
        raise UserError(f"expected a network of torchvision, found {name!r}: {_nearest(name, known)}")
    shape = _shape_asked(wanted) or ((3, 299, 299) if "inception" in name else (3, 224, 224))
    classes = arguments.pop("num_classes", 1000)
    return {"name": name, "input_shape": list(shape), "num_classes": classes, "arguments": arguments}


def _hugging_face(wanted: Wanted) -> dict[str, Any]:
    """By a config.json, or by the sizes that are known; the arguments change single settings."""
    name, shape = wanted.target.name, _shape_asked(wanted)
    architecture, sizes = _read_config(Path(name)) if name.endswith(".json") else known_architecture(name)
    network: dict[str, Any] = {"architecture": architecture, "config": {**sizes, **wanted.arguments}}
    if shape is not None and len(shape) == 3:
        network["image_size"] = list(shape[1:])
    sequence = (shape or (None,))[-1] if shape is None or len(shape) == 1 else None
    speaks = architecture.startswith("Whisper")
    return {**network, "sequence": sequence if speaks else sequence or _SEQUENCE}


def _read_config(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"expected the config.json of a network at {path}, found: {error}; check the path") from error
    named = config.get("architectures") if isinstance(config, dict) else None
    if not named:
        raise UserError(f"expected 'architectures' in {path}, found none: add the class, as in [\"LlamaForCausalLM\"]")
    return named[0], {key: value for key, value in config.items() if key not in ("architectures", "model_type")}


_LIBRARIES: Mapping[str, Callable[[Wanted], dict[str, Any]]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "hf": _hugging_face,
}
