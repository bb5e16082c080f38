"""Backends: what measures a spec."""
