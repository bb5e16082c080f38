"""Networks of other libraries, by name. No weights are downloaded; the library is imported when one is built."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from dataset_builder.errors import UserError
from dataset_builder.families.libraries import import_library
from dataset_builder.families.weightless import built_on_meta
from dataset_builder.plan import InputTensor

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
    timm = import_library("timm")
    arguments = {"pretrained": False, "num_classes": network["num_classes"], **network.get("arguments", {})}
    subject = _built_on(device, lambda: timm.create_model(network["name"], **arguments))
    return subject, (InputTensor(tuple(network["input_shape"])),)


def _torchvision(network: Network, device: str) -> Built:
    """Classifiers; `arguments` are those of their constructor."""
    get = import_library("torchvision").models.get_model
    arguments = {"weights": None, "num_classes": network["num_classes"], **network.get("arguments", {})}
    return _built_on(device, lambda: get(network["name"], **arguments)), (InputTensor(tuple(network["input_shape"])),)


def _hugging_face(network: Network, device: str) -> Built:
    """A class of transformers with the settings of its configuration; fed what its kind takes, and labels."""
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
    return ByKeyword(subject, list(inputs)), tuple(inputs.values())


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


_BUILDERS: Mapping[str, Callable[[Network, str], Built]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "hf": _hugging_face,
}
