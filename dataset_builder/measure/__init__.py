"""Backends: what measures a spec."""

from collections.abc import Mapping
from typing import Any

from dataset_builder.errors import UserError, check_choice
from dataset_builder.measure._base import Backend, Outcome
from dataset_builder.measure.static import StaticBackend

BACKENDS: Mapping[str, type[Backend]] = {"static": StaticBackend}


def make_backend(name: str, **settings: Any) -> Backend:
    """The backend of that name."""
    check_choice("backend", name, BACKENDS)
    try:
        return BACKENDS[name](**settings)
    except TypeError as error:
        raise UserError(f"expected settings of the backend {name}, found {sorted(settings)}: {error}") from error


__all__ = ["Backend", "Outcome", "BACKENDS", "make_backend"]
