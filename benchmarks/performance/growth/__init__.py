"""How cost grows with the size of a job, with cores and with load: `python -m benchmarks.performance.growth`."""
