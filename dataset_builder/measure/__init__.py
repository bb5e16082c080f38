"""Backends: what measures a spec."""

from vramcast.dataset_builder.measure._base import Backend, Outcome

__all__ = ["Backend", "Outcome"]
