"""Conversion of dataclasses from and to mappings, and content hashes."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, TypeVar

from vramcast.errors import UserError

T = TypeVar("T")


def canonical_json(value: Any) -> str:
    """Return the canonical JSON text of a value: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def content_hash(value: Any) -> str:
    """Return 128 bits of SHA-256 over the canonical JSON text."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:32]


def without_defaults(instance: Any) -> dict[str, Any]:
    """Return the fields that differ from their default, so that a new field changes no hash."""
    return {
        item.name: value
        for item in fields(instance)
        if (value := getattr(instance, item.name)) != item.default or item.default is MISSING
    }


@cache
def _field_names(cls: Any) -> tuple[frozenset[str], frozenset[str]]:
    """Return all fields of a dataclass, and those without a default."""
    required = {item.name for item in fields(cls) if item.default is MISSING and item.default_factory is MISSING}
    return frozenset(item.name for item in fields(cls)), frozenset(required)


def from_mapping(cls: type[T], values: Mapping[str, Any], what: str) -> T:
    """Build a dataclass from a mapping; raise UserError with the keys that are unknown or missing."""
    if not isinstance(values, Mapping):
        raise UserError(f"expected {what} to be a mapping, found {values!r}: change it")
    names, required = _field_names(cls)  # type: ignore[arg-type]
    unknown = sorted(map(str, values.keys() - names))
    if unknown:
        raise UserError(f"expected {what} to have only {sorted(names)}, found {unknown}: remove or rename them")
    missing = sorted(required - values.keys())
    if missing:
        raise UserError(f"expected {what} to have {missing}, found {sorted(map(str, values))}: add them")
    return cls(**values)
