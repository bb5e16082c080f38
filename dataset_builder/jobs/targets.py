"""What a user may name as a network: text in, a target out. Nothing is imported or run here."""

import ast
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from vramcast.errors import UserError, check_count
from vramcast.virtual_gpu.records import from_mapping

LIBRARIES = ("timm", "hf", "torchvision")
GPUMEMNET = "gpumemnet:"
"""What stands before a file name of the public sets, from which a spec is read."""
FORMS = (
    "path/to/file.py:factory, package.module:factory, timm:NAME, hf:NAME, hf:path/to/config.json, torchvision:NAME, "
    f"{GPUMEMNET}FILENAME, a spec (.json, .yaml), or a layer table (.json, or the text of torchinfo or torchsummary)"
)


@dataclass(frozen=True)
class Target:
    """A network that is built in the child: by a library, or by a user's code."""

    text: str
    kind: str
    """'file', 'module', or a library."""
    name: str
    """A path, the name of a module, or a network's name in its library."""
    factory: str = ""
    """Of a file or module."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A target and how its network is made, fed and stepped: what a child is sent to build."""

    target: Target
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of the factory, or of the library's function."""
    inputs: tuple[str, ...] = ()
    """Shapes without the batch, 'SHAPE' or 'SHAPE:VOCABULARY' each."""
    inputs_factory: str | None = None
    """A function of the target's file or module, from a batch size to a batch."""
    step_factory: str | None = None
    """A function of (network, batch) that returns the loss."""
    directory: str = "."
    """Where it is looked for: the user's."""

    def to_json(self) -> dict[str, Any]:
        """A mapping that `from_json` reads back."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote."""
        wanted = {**values, "target": Target(**values["target"]), "inputs": tuple(values["inputs"])}
        return from_mapping(cls, wanted, "what is to be built")


def parse_target(text: str) -> Target:
    """The network that a text names, where it must be built; specs and tables are read by `read_document`."""
    scheme, colon, rest = text.partition(":")
    if colon and scheme in LIBRARIES and rest:
        return Target(text, scheme, rest)
    name, colon, factory = text.rpartition(":")
    if not colon or not factory.isidentifier() or not name:
        raise UserError(f"expected {FORMS}, found {text!r}: name the network in one of these ways")
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise UserError(f"expected a Python file at {name}, found none: check the path")
        return Target(text, "file", str(Path(name).resolve()), factory)
    if not all(part.isidentifier() for part in name.split(".")):
        raise UserError(f"expected {FORMS}, found {text!r}: name the network in one of these ways")
    return Target(text, "module", name, factory)


def is_document(text: str) -> bool:
    """Whether a text names a file that describes a network."""
    return text.endswith((".json", ".yaml", ".yml", ".txt")) and not text.startswith(tuple(f"{x}:" for x in LIBRARIES))


def read_document(path: str) -> Any:
    """What a file holds: values of JSON or YAML, or plain text."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # no text, or no path at all
        raise UserError(
            f"expected a file that describes a network at {path}, found: {error}; check the path"
        ) from error
    if path.endswith(".txt"):
        return text
    try:
        if path.endswith(".json"):
            return json.loads(text)
        import yaml  # noqa: PLC0415 - few specs are written in it

        return yaml.safe_load(text)
    except ValueError as error:
        raise UserError(f"expected JSON in {path}, found: {error}; mend it") from error
    except yaml.YAMLError as error:
        raise UserError(f"expected YAML in {path}, found: {' '.join(str(error).split())}; mend it") from error


def parse_shape(text: str) -> tuple[tuple[int, ...], int | None]:
    """'3,224,224' is a shape of numbers without the batch, '512:30522' one of tokens with their vocabulary."""
    shape, _, vocabulary = text.partition(":")
    try:
        sizes = tuple(int(item) for item in shape.split(",") if item.strip())
        words = int(vocabulary) if vocabulary else None
    except ValueError as error:
        raise UserError(f"expected an input such as 3,224,224 or 512:30522, found {text!r}: write it so") from error
    for size in (*sizes, *([words] if words is not None else [])):
        check_count("a size of --input", size)
    return sizes, words


def parse_argument(text: str) -> tuple[str, Any]:
    """'depth=18' as a name and a Python literal; what is none is a string."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UserError(f"expected an argument such as depth=18, found {text!r}: write it so")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
