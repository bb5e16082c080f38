"""The version of the virtual GPU, by which stored simulations are told apart."""

VERSION = 1
"""Raised whenever a trace or a replay changes; `tests/test_golden_traces.py` fails until it is."""
