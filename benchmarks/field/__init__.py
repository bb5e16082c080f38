"""Comparison with the field: every estimator on the same measured rows (`python -m benchmarks.field`)."""
