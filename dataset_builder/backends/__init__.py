"""Backends: what measures a spec."""

from vramcast.dataset_builder.backends._base import Backend, BackendResult

__all__ = ["Backend", "BackendResult"]
