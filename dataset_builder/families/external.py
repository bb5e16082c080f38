"""Networks of other libraries, by name. No weights are downloaded; the library is imported when one is built."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from vramcast.dataset_builder.families.libraries import import_library
from vramcast.dataset_builder.families.scripts import build_script
from vramcast.dataset_builder.families.weightless import built_on_meta
from vramcast.dataset_builder.plan import InputTensor
from vramcast.errors import UserError

Network = Mapping[str, Any]
Built = tuple[nn.Module, tuple[InputTensor, ...]]


def build_external(family: str, network: Network, device: str = "meta") -> Built:
    """The module in training mode, and what it is fed."""
    if family not in _BUILDERS:
        raise UserError(f"expected a family of {sorted(_BUILDERS)}, found {family!r}: choose one that can be built")
    subject, inputs = _BUILDERS[family](network, device)
    return subject.train(), inputs


def _built_on(device: str, make: Callable[[], nn.Module]) -> nn.Module:
    return built_on_meta(make) if device == "meta" else make().to(device)


def _timm(network: Network, device: str) -> Built:
    """By name; with `windows`, Hiera's global attention is that over one window, as timm had it up to 1.0.25."""
    timm = import_library("timm")
    arguments = {"pretrained": False, "num_classes": network["num_classes"], **network.get("arguments", {})}
    subject = _built_on(device, lambda: timm.create_model(network["name"], **arguments))
    if network.get("windows"):
        _attend_by_windows(subject)
    return subject, (InputTensor(tuple(network["input_shape"])),)


def _attend_by_windows(subject: nn.Module) -> None:
    """One window of all places has a dimension more, and no fused kernel takes attention with five."""
    parts: Iterable[Any] = subject.modules()
    for part in parts:
        if getattr(part, "use_mask_unit_attn", None) is False:
            part.use_mask_unit_attn = True
            part.register_forward_pre_hook(_take_one_window)


def _take_one_window(module: Any, inputs: tuple[Tensor, ...]) -> None:
    module.window_size = inputs[0].shape[1] // module.q_stride


def _torchvision(network: Network, device: str) -> Built:
    """Classifiers; `arguments` are those of their constructor."""
    get = import_library("torchvision").models.get_model
    arguments = {"weights": None, "num_classes": network["num_classes"], **network.get("arguments", {})}
    return _built_on(device, lambda: get(network["name"], **arguments)), (InputTensor(tuple(network["input_shape"])),)


def _hugging_face(network: Network, device: str) -> Built:
    """A class of transformers with the settings of its configuration; fed what its kind takes, and labels.

    With `cards`, what the first of so many cards of torch.nn.DataParallel sees. With `token_types`, also the types of
    tokens that some tokenizers give: XLNet keeps a matrix of them for every layer, most others only look them up.
    """
    transformers = import_library("transformers")
    architecture = getattr(transformers, network["architecture"], None)
    if architecture is None:
        raise UserError(
            f"expected a class of transformers {transformers.__version__}, found {network['architecture']!r}: "
            "check the name, or update transformers"
        )
    config = architecture.config_class(**network.get("config", {}))
    subject = _built_on(device, lambda: architecture(config))
    inputs = _hugging_face_inputs(subject, network)
    named: nn.Module = ByKeyword(subject, list(inputs))
    cards = int(network.get("cards", 1))
    return FirstOfCards(named, cards) if cards > 1 else named, tuple(inputs.values())


def _script(network: Network, device: str) -> Built:
    subject = _built_on(device, lambda: build_script(network["name"], network["num_classes"]))
    return subject, (InputTensor(tuple(network["input_shape"])),)


_TEXT_OF_SPEECH = 128
"""Tokens of a transcript, where nobody says how many."""


def _hugging_face_inputs(subject: Any, network: Network) -> dict[str, InputTensor]:
    """What a class of transformers takes, by the name of its main input, and labels for its own loss."""
    config, name, kind = subject.config, subject.main_input_name, network["architecture"]
    vocabulary = getattr(config, "vocab_size", None) or getattr(config.get_text_config(), "vocab_size", None)
    inputs: dict[str, InputTensor] = {}
    if name == "pixel_values":
        size = network.get("image_size") or config.image_size
        sides = tuple(size) if isinstance(size, list | tuple) else (int(size), int(size))
        inputs[name] = InputTensor((int(config.num_channels), *sides))
        tokens: tuple[int, ...] = ()
    elif name == "input_features":  # mel spectra; two frames become one place (WhisperEncoder)
        inputs[name] = InputTensor((int(config.num_mel_bins), 2 * int(config.max_source_positions)))
        tokens = (int(network.get("sequence") or _TEXT_OF_SPEECH),)
    else:
        tokens = (int(network["sequence"]),)
        inputs = {"input_ids": InputTensor(tokens, vocabulary), "attention_mask": InputTensor(tokens, 2)}
        inputs |= {"token_type_ids": InputTensor(tokens, 2)} if network.get("token_types") else {}
    if "Classification" in kind and "Token" not in kind:
        return {**inputs, "labels": InputTensor((), int(config.num_labels))}
    return {**inputs, "labels": InputTensor(tokens, vocabulary)}


class ByKeyword(nn.Module):
    """A module whose inputs have names; its answer keeps its own loss."""

    def __init__(self, subject: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.subject = subject
        self.names = names

    def forward(self, *inputs: Tensor) -> Any:
        """Name the inputs."""
        return self.subject(**dict(zip(self.names, inputs, strict=True)))


class FirstOfCards(nn.Module):
    """A module under torch.nn.DataParallel on its first card: that has the whole batch, computes its share of it, and
    gathers what all cards answer with (torch/nn/parallel/data_parallel.py). Every tensor of an answer counts, caches of
    keys and values too.
    """

    def __init__(self, subject: nn.Module, cards: int) -> None:
        super().__init__()
        self.subject = subject
        self.cards = cards

    def forward(self, *inputs: Tensor) -> Any:
        """The answer of all cards, whose loss is the mean of theirs."""
        share = -(-len(inputs[0]) // self.cards)
        found = dict(self.subject(*(item[:share] for item in inputs)))
        gathered = {name: self._gathered(value) for name, value in found.items()}
        return SimpleNamespace(loss=gathered.pop("loss").mean(), rest=gathered)

    def _gathered(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            part = value if value.dim() else value.unsqueeze(0)
            return torch.cat([part, *[part.detach()] * (self.cards - 1)])
        if isinstance(value, list | tuple):
            return [self._gathered(item) for item in value]
        layers = getattr(value, "layers", ())  # of a cache; older versions of transformers have tuples
        return [self._gathered((layer.keys, layer.values)) for layer in layers]


_BUILDERS: Mapping[str, Callable[[Network, str], Built]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "hf": _hugging_face,
    "script": _script,
}
