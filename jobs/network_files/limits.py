"""Bounds on what a file may make a reader do, and the checks that raise them as sentences."""

import json
from collections.abc import Mapping
from math import prod
from typing import Any

from vramcast.errors import UserError

FILE_BYTES = 64 << 20
"""Of a description, in a file of its own or inside an archive. Weights beside it are skipped and do not count."""
OPERATIONS = 20_000
"""In one file; the largest networks of timm and transformers have about 5,000."""
_SIZE = 2**40
_ELEMENTS = 2**50
_RANK = 16
_LONGEST_NAME = 1000


def parse_json(data: bytes, what: str) -> Any:
    """Parse JSON; raise a UserError for other bytes, for NaN, and for values that are nested too deeply."""
    if len(data) > FILE_BYTES:
        raise UserError(f"expected {what} of at most {FILE_BYTES >> 20} MiB, found {len(data) >> 20}: make it smaller")
    try:
        return json.loads(data.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, an integer of thousands of digits
        raise UserError(f"expected JSON in {what}, found: {_first_line(error)}; write it again") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"the constant {name}")


def _first_line(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text.splitlines()[0][:200]


def check_operations(count: int, what: str) -> None:
    """Raise a UserError for a network with too many layers, or with none."""
    if not 0 < count <= OPERATIONS:
        raise UserError(f"expected 1 to {OPERATIONS} operations in {what}, found {count}: name another file")


def checked_shape(value: Any, what: str, least: int = 0) -> tuple[int, ...]:
    """Return a shape whose tensor a device could hold; raise a UserError for any other value."""
    if not isinstance(value, list | tuple) or len(value) > _RANK:
        raise UserError(
            f"expected the shape of {shown(what)} as up to {_RANK} whole numbers, found {shown(value)}: fix it"
        )
    for size in value:
        if not isinstance(size, int) or isinstance(size, bool) or not least <= size <= _SIZE:
            raise UserError(
                f"expected sizes from {least} to 2**40 in the shape of {shown(what)}, found {shown(value)}: fix it"
            )
    if prod(value) > _ELEMENTS:
        raise UserError(f"expected {shown(what)} to have at most 2**50 elements, found {shown(value)}: fix it")
    return tuple(value)


def text_of(value: Any, what: str) -> str:
    """Return a text of usual length; raise a UserError for any other value."""
    if not isinstance(value, str) or len(value) > _LONGEST_NAME:
        raise UserError(
            f"expected {what} as a text of at most {_LONGEST_NAME} characters, found {shown(value)}: fix it"
        )
    return value


def mapping_of(value: Any, what: str) -> Mapping[str, Any]:
    """Return a mapping; raise a UserError for any other value."""
    if not isinstance(value, Mapping):
        raise UserError(f"expected {shown(what)} as a mapping, found {shown(value)}: fix it")
    return value


def list_of(value: Any, what: str) -> list[Any]:
    """Return a list; raise a UserError for any other value."""
    if not isinstance(value, list):
        raise UserError(f"expected {shown(what)} as a list, found {shown(value)}: fix it")
    return value


def shown(value: Any) -> str:
    """Return the start of a value in one line, for an error."""
    text = value if isinstance(value, str) else repr(value) if not isinstance(value, Mapping | list) else _brief(value)
    printable = "".join(letter if letter.isprintable() else "?" for letter in text[:61])
    return printable if len(printable) <= 60 else f"{printable[:60]}..."


def _brief(value: Any) -> str:
    """Return a short text of a container, which may be too deep or too large to print."""
    if isinstance(value, list) and len(value) <= _RANK and all(isinstance(item, int | str | None) for item in value):
        return repr([item[:20] if isinstance(item, str) else item for item in value])
    return f"a {type(value).__name__} of {len(value)}"
