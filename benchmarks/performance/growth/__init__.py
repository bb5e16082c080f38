"""How cost grows with a job, with cores and with load: `python -m benchmarks.performance.growth`."""
