"""The field: every estimator on the same measured rows, as tables and pictures. `python -m benchmarks.field`."""
