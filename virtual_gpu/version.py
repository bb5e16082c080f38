"""The version of the virtual GPU, part of the key of stored simulations."""

VERSION = 11
"""Increase it whenever a trace or a replay changes; `tests/test_golden_traces.py` fails until then."""
