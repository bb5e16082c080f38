"""Backends: what measures a spec."""

from collections.abc import Mapping

from dataset_builder.errors import check_choice
from dataset_builder.measure._base import Backend, Outcome
from dataset_builder.measure.static import StaticBackend

BACKENDS: Mapping[str, type[Backend]] = {"static": StaticBackend}


def make_backend(name: str) -> Backend:
    """The backend of that name."""
    check_choice("backend", name, BACKENDS)
    return BACKENDS[name]()


__all__ = ["Backend", "Outcome", "BACKENDS", "make_backend"]
