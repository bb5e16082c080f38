"""Targets: the texts by which a user names a network. Nothing is imported or run here."""

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from vramcast.errors import UserError, check_count
from vramcast.files.yaml_text import parse_yaml
from vramcast.virtual_gpu.canonical import from_mapping

LIBRARIES = ("timm", "hf", "diffusers", "torchvision")
GPUMEMNET = "gpumemnet:"
"""Prefix of a file name of the public data sets, which encodes a spec."""
_LARGEST = 2**31
"""torch cannot index larger tensors."""
FORMS = (
    "path/to/file.py:factory, package.module:factory, timm:NAME, hf:NAME, hf:path/to/config.json, diffusers:NAME, "
    f"torchvision:NAME, {GPUMEMNET}FILENAME, a spec (.json, .yaml), "
    "or a file without code: ONNX, torch.export, Keras' JSON, a config.json, safetensors, torchinfo, a layer table"
)


@dataclass(frozen=True)
class Target:
    """A network that is built in the child process, by a library or by the user's code."""

    text: str
    kind: str
    """'file', 'module', or a library."""
    name: str
    """A path, a module, or the network's name in its library."""
    factory: str = ""
    """A function or class of the file or module."""


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """A target, and how its network is built, fed and stepped in the child process."""

    target: Target
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the factory, or of the library's function."""
    inputs: tuple[str, ...] = ()
    """Shapes without the batch, each 'SHAPE' or 'SHAPE:VOCABULARY'."""
    inputs_factory: str | None = None
    """A function of the target's file or module that returns a batch for a batch size."""
    step_factory: str | None = None
    """A function of (network, batch) that returns the loss."""
    packed: bool = False
    """All sequences of a language model have the full length, so that there is no mask for padding."""
    keep_output: bool = False
    """The output of a network of transformers lives until the next one, as in a plain loop; the Trainer frees it."""
    directory: str = "."
    """The user's working directory."""
    python: str | None = None
    """The interpreter that builds the network: a path, a command, or the directory of an environment."""

    def to_json(self) -> dict[str, Any]:
        """Return a mapping that `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read a mapping that `to_json` wrote."""
        parsed = {**values, "target": Target(**values["target"]), "inputs": tuple(values["inputs"])}
        return from_mapping(cls, parsed, "a build request")


def parse_target(text: str) -> Target:
    """Return the target that a text names. Specs and layer tables are read by `read_document` instead."""
    scheme, colon, rest = text.partition(":")
    if colon and scheme in LIBRARIES and rest:
        return Target(text, scheme, rest)
    if text.endswith(".py") and is_file(text):
        raise UserError(f"expected a name after {text}, found none: {_suggestion(text)}")
    name, colon, factory = text.rpartition(":")
    if not colon or not factory.isidentifier() or not name:
        raise UserError(f"expected {FORMS}, found {text!r}: name the network in one of these ways")
    if name.endswith(".py"):
        if not is_file(name):
            raise UserError(f"expected a Python file at {name}, found none: check the path")
        return Target(text, "file", str(Path(name).resolve()), factory)
    if not all(part.isidentifier() for part in name.split(".")):
        raise UserError(f"expected {FORMS}, found {text!r}: name the network in one of these ways")
    return Target(text, "module", name, factory)


def is_file(path: str | Path) -> bool:
    """Return whether there is a file at a path; False for a name that is too long for any file."""
    try:
        return Path(path).is_file()
    except OSError:
        return False


def _suggestion(path: str) -> str:
    """List the networks that a Python file defines, from its syntax alone: running it may start a training."""
    try:
        nodes = ast.parse(Path(path).read_text(encoding="utf-8")).body
    except (OSError, ValueError, SyntaxError) as error:
        return f"fix the file first ({error})"
    modules: list[str] = []
    for node in nodes:
        if isinstance(node, ast.ClassDef) and any(_is_module(base, modules) for base in node.bases):
            modules.append(node.name)
    functions = [
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(item, ast.Return) and item.value for item in ast.walk(node))
    ]
    names = [name for name in (*modules, *functions) if not name.startswith("_")]
    if not names:
        return "add a function that returns the network, and name it"
    return f"name one of {', '.join(f'{path}:{name}' for name in names)}"


def _is_module(base: ast.expr, modules: Sequence[str]) -> bool:
    name = ast.unparse(base)
    return name.endswith("Module") or name in modules


_DESCRIPTIONS = (".json", ".yaml", ".yml", ".txt", ".onnx", ".pt2", ".keras", ".safetensors")


def is_document(text: str) -> bool:
    """Return whether a text names a file that describes a network: by its suffix, or any file but Python's."""
    if text.startswith(tuple(f"{library}:" for library in LIBRARIES)):
        return False
    return text.endswith(_DESCRIPTIONS) or (not text.endswith(".py") and is_file(text))


def read_document(path: str) -> Any:
    """Read a file: the value of JSON or YAML, or plain text."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # not UTF-8, or not a valid path
        raise UserError(
            f"expected a file that describes a network at {path}, found: {error}; check the path"
        ) from error
    if path.endswith(".txt"):
        return text
    if path.endswith(".json"):
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"expected JSON in {path}, found: {error}; fix it") from error
    return parse_yaml(text, path)


def parse_shape(text: str) -> tuple[tuple[int, ...], int | None]:
    """Parse '3,224,224' (numbers) or '512:30522' (tokens and their vocabulary), both without the batch."""
    shape, _, vocabulary = text.partition(":")
    try:
        sizes = tuple(int(item) for item in shape.split(",") if item.strip())
        words = int(vocabulary) if vocabulary else None
    except ValueError as error:
        raise UserError(
            f"expected an input such as 3,224,224 or 512:30522, found {text!r}: write it like that"
        ) from error
    for size in (*sizes, *([words] if words is not None else [])):
        check_count("a size of --input", size)
        if size > _LARGEST:
            raise UserError(f"expected a size of --input to be at most {_LARGEST}, found {size}: change it")
    return sizes, words


def parse_argument(text: str) -> tuple[str, Any]:
    """Parse 'depth=18' into a name and a Python literal, or a string if it is not a literal."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UserError(f"expected an argument such as depth=18, found {text!r}: write it like that")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # the last two: too deeply nested
        return name, value
