"""Builds networks of other libraries by name. No weights are downloaded; a library is imported when it is used."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from vramcast.errors import UserError
from vramcast.jobs.families.diffusion import build_denoiser
from vramcast.jobs.families.keyword_inputs import KeywordInputs
from vramcast.jobs.families.libraries import import_library
from vramcast.jobs.families.made_networks import detector, recurrent, unet
from vramcast.jobs.families.meta_device import build_on_meta
from vramcast.jobs.families.random_networks import random_network
from vramcast.jobs.families.script_networks import build_script_network
from vramcast.jobs.plan import InputTensor

Network = Mapping[str, Any]
Built = tuple[nn.Module, tuple[InputTensor, ...]]


def build_external(family: str, network: Network, device: str = "meta") -> Built:
    """Return the module in training mode and its inputs."""
    if family not in _BUILDERS:
        raise UserError(f"expected a family of {sorted(_BUILDERS)}, found {family!r}: choose one of these")
    subject, inputs = _BUILDERS[family](network, device)
    return subject.train(), inputs


def _build_on(device: str, make: Callable[[], nn.Module]) -> nn.Module:
    return build_on_meta(make) if device == "meta" else make().to(device)


def _timm(network: Network, device: str) -> Built:
    """Build a network of timm; with `windows`, Hiera's global attention runs over one window, as in timm <= 1.0.25."""
    timm = import_library("timm")
    arguments = {"pretrained": False, "num_classes": network["num_classes"], **network.get("arguments", {})}
    subject = _build_on(device, lambda: timm.create_model(network["name"], **arguments))
    if network.get("windows"):
        _attend_by_windows(subject)
    return subject, (InputTensor(tuple(network["input_shape"])),)


def _attend_by_windows(subject: nn.Module) -> None:
    """Make Hiera attend over one window: this adds a dimension, and no fused kernel takes five of them."""
    parts: Iterable[Any] = subject.modules()
    for part in parts:
        if getattr(part, "use_mask_unit_attn", None) is False:
            part.use_mask_unit_attn = True
            part.register_forward_pre_hook(_take_one_window)


def _take_one_window(module: Any, inputs: tuple[Tensor, ...]) -> None:
    module.window_size = inputs[0].shape[1] // module.q_stride


def _torchvision(network: Network, device: str) -> Built:
    """Build a classifier of torchvision; `arguments` go to its constructor."""
    get = import_library("torchvision").models.get_model
    arguments = {"weights": None, "num_classes": network["num_classes"], **network.get("arguments", {})}
    return _build_on(device, lambda: get(network["name"], **arguments)), (InputTensor(tuple(network["input_shape"])),)


def _hugging_face(network: Network, device: str) -> Built:
    """Build a class of transformers from the settings of its configuration; its inputs include labels.

    `cards` is the number of GPUs of torch.nn.DataParallel, of which the first is simulated. `token_types` adds the
    token types that some tokenizers return: XLNet keeps a matrix of them for every layer, most others do a lookup.
    `mask` is False for sequences without padding, for which transformers makes no mask, and 'padding' for batches that
    are padded to their longest sequence: a batch of one has none.
    """
    transformers = import_library("transformers")
    architecture = getattr(transformers, network["architecture"], None)
    if architecture is None:
        raise UserError(
            f"expected a class of transformers {transformers.__version__}, found {network['architecture']!r}: "
            "check the name, or update transformers"
        )
    config = architecture.config_class(**network.get("config", {}))
    subject = _build_on(device, lambda: architecture(config))
    inputs = _hugging_face_inputs(subject, network)
    module: nn.Module = KeywordInputs(subject, list(inputs), pads_to_longest=network.get("mask") == "padding")
    replicas = int(network.get("cards", 1))
    return FirstReplica(module, replicas) if replicas > 1 else module, tuple(inputs.values())


def _script(network: Network, device: str) -> Built:
    subject = _build_on(device, lambda: build_script_network(network["name"], network["num_classes"]))
    return subject, (InputTensor(tuple(network["input_shape"])),)


def _made(make: Callable[[Network], Built], network: Network, device: str) -> Built:
    """Build a network of a form of our own."""
    inputs: list[tuple[InputTensor, ...]] = []

    def module() -> nn.Module:
        made, own = make(network)
        inputs.append(own)
        return made

    return _build_on(device, module), inputs[-1]


_TRANSCRIPT_TOKENS = 128
"""Default number of tokens of a transcript."""


def _hugging_face_inputs(subject: Any, network: Network) -> dict[str, InputTensor]:
    """Return the inputs of a class of transformers, by the name of its main input, and labels for its own loss."""
    config, name, kind = subject.config, subject.main_input_name, network["architecture"]
    vocabulary = getattr(config, "vocab_size", None) or getattr(config.get_text_config(), "vocab_size", None)
    inputs: dict[str, InputTensor] = {}
    if name == "pixel_values":
        size = network.get("image_size") or config.image_size
        sides = tuple(size) if isinstance(size, list | tuple) else (int(size), int(size))
        inputs[name] = InputTensor((int(config.num_channels), *sides))
        tokens: tuple[int, ...] = ()
    elif name == "input_features":  # mel spectra; two frames become one position (WhisperEncoder)
        inputs[name] = InputTensor((int(config.num_mel_bins), 2 * int(config.max_source_positions)))
        tokens = (int(network.get("sequence") or _TRANSCRIPT_TOKENS),)
    else:
        tokens = (int(network["sequence"]),)
        inputs = {"input_ids": InputTensor(tokens, vocabulary)}
        inputs |= {"attention_mask": InputTensor(tokens, 2)} if network.get("mask", True) else {}
        inputs |= {"token_type_ids": InputTensor(tokens, 2)} if network.get("token_types") else {}
    if "Classification" in kind and "Token" not in kind:
        return {**inputs, "labels": InputTensor((), int(config.num_labels))}
    return {**inputs, "labels": InputTensor(tokens, vocabulary)}


class FirstReplica(nn.Module):
    """The first GPU of torch.nn.DataParallel: it holds the whole batch, computes its share, and gathers all outputs.

    Every tensor of an output is gathered, also key-value caches (torch/nn/parallel/data_parallel.py).
    """

    def __init__(self, subject: nn.Module, replicas: int) -> None:
        super().__init__()
        self.subject = subject
        self.replicas = replicas

    def forward(self, *inputs: Tensor) -> Any:
        """Return the gathered outputs; the loss is the mean over the replicas."""
        share = -(-len(inputs[0]) // self.replicas)
        outputs = dict(self.subject(*(item[:share] for item in inputs)))
        gathered = {name: self._gather(value) for name, value in outputs.items()}
        return SimpleNamespace(loss=gathered.pop("loss").mean(), rest=gathered)

    def _gather(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            part = value if value.dim() else value.unsqueeze(0)
            return torch.cat([part, *[part.detach()] * (self.replicas - 1)])
        if isinstance(value, list | tuple):
            return [self._gather(item) for item in value]
        layers = getattr(value, "layers", ())  # a key-value cache; older versions of transformers use tuples
        return [self._gather((layer.keys, layer.values)) for layer in layers]


_BUILDERS: Mapping[str, Callable[[Network, str], Built]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "hf": _hugging_face,
    "diffusers": lambda network, device: build_denoiser(network, partial(_build_on, device)),
    "script": _script,
    "recurrent": partial(_made, recurrent),
    "unet": partial(_made, unet),
    "detector": partial(_made, detector),
    "random": partial(_made, random_network),
}
