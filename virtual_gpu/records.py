"""Dataclasses from mappings and back, and hashes of their content."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, TypeVar

from vramcast.errors import UserError

T = TypeVar("T")


def canonical_json(value: Any) -> str:
    """One text for one value: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def content_hash(value: Any) -> str:
    """128 bits of SHA-256 over the canonical text."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:32]


def without_defaults(instance: Any) -> dict[str, Any]:
    """The fields that differ from their default, so that a field added later changes no hash."""
    return {
        item.name: value
        for item in fields(instance)
        if (value := getattr(instance, item.name)) != item.default or item.default is MISSING
    }


@cache
def _field_names(cls: Any) -> tuple[frozenset[str], frozenset[str]]:
    """All fields of a dataclass, and those without a default."""
    required = {item.name for item in fields(cls) if item.default is MISSING and item.default_factory is MISSING}
    return frozenset(item.name for item in fields(cls)), frozenset(required)


def from_mapping(cls: type[T], values: Mapping[str, Any], what: str) -> T:
    """Build a dataclass from a mapping, naming the keys that are unknown or missing."""
    known, required = _field_names(cls)  # type: ignore[arg-type]
    unknown = sorted(values.keys() - known)
    if unknown:
        raise UserError(f"expected {what} to have only {sorted(known)}, found {unknown}: remove or rename them")
    missing = sorted(required - values.keys())
    if missing:
        raise UserError(f"expected {what} to have {missing}, found {sorted(values)}: add them")
    return cls(**values)
