"""Backends: what measures a spec."""

from dataset_builder.measure._base import Backend, Outcome

__all__ = ["Backend", "Outcome"]
