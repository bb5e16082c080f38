"""Backends: what measures a spec."""

from vramcast.dataset_builder.measure._base import Backend, BackendResult

__all__ = ["Backend", "BackendResult"]
