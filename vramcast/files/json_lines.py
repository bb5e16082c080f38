"""JSON of users, read strictly and within bounds: a bad line is an error of its own and of no other line."""

import json
from collections.abc import Iterator
from math import isfinite
from typing import Any

from vramcast.error_words import shortened
from vramcast.errors import UserError

_WHITESPACE = b" \t\r\n"
"""That of JSON (RFC 8259, section 2): a line of other characters is no blank line."""
_LONGEST_NUMBER = 100
"""Characters; Python refuses to print integers of more than 4,300 digits, so no error could name a longer one."""
_DEEPEST = 100
"""Levels of nesting; much deeper values cannot be printed, copied or hashed."""
_LONGEST_REASON = 300


def numbered_lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of JSON Lines that are not blank, with their numbers; a newline alone ends a line."""
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip(_WHITESPACE):
            yield number, line


def parse_object(line: bytes, what: str) -> dict[str, Any]:
    """Return the object in a line; raise UserError for anything that is not one in strict JSON."""
    try:
        value = json.loads(line.decode("utf-8"), parse_constant=_no_number, parse_float=_float, parse_int=_int)
        if isinstance(value, dict):
            _check_depth(value)
            return value
    except (ValueError, RecursionError) as error:
        reason = str(error)
        if isinstance(error, RecursionError):
            reason = f"more than {_DEEPEST} levels of nesting"
        elif isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg} at column {error.colno}"
        raise UserError(
            f"expected a JSON object {what}, found: {shortened(reason, _LONGEST_REASON)}; fix it"
        ) from error
    raise UserError(f"expected a JSON object {what}, found {_KINDS.get(type(value), 'null')}: fix it")


_KINDS = {list: "a list", str: "a text", bool: "a truth value", int: "a number", float: "a number"}


def _no_number(text: str) -> float:
    raise ValueError(f"{text}, which is no number")


def _float(text: str) -> float:
    if not isfinite(value := float(text)):
        raise ValueError(f"{text[:_LONGEST_NUMBER]}, which is too large")
    return value


def _int(text: str) -> int:
    if len(text) > _LONGEST_NUMBER:
        raise ValueError(f"a number of {len(text)} characters")
    return int(text)


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(_DEEPEST):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return
    raise RecursionError
