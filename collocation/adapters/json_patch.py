"""JSON Patch (RFC 6902), as far as the webhook writes it: additions alone."""

from collections.abc import Mapping
from typing import Any

Patch = list[dict[str, Any]]


def add(path: str, value: Any) -> dict[str, Any]:
    """Return the operation that adds a value."""
    return {"op": "add", "path": path, "value": value}


def escaped(key: str) -> str:
    """Return a key as a step of a JSON pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")


def added(path: str, there: Any, entries: Mapping[str, Any]) -> Patch:
    """Return the operations that add entries to an object, which is made first if it is missing."""
    if not entries:
        return []
    start = [] if isinstance(there, Mapping) else [add(path, {})]
    return start + [add(f"{path}/{escaped(key)}", value) for key, value in entries.items()]


def appended(path: str, there: Any, value: Any) -> dict[str, Any]:
    """Return the operation that appends a value to a list, which is made if it is missing."""
    return add(f"{path}/-", value) if isinstance(there, list) else add(path, [value])
