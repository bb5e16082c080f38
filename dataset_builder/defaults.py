"""Defaults that several commands share. The default device is in `devices`."""

CHECKPOINT = "universal"
"""Name of the released estimator."""
RISK = 0.01
"""Share of safe figures that may be too low."""
BUCKET_MIB = 1024
"""Width of a bucket."""
SIMULATIONS = "runs/simulations"
"""Directory in which simulations are cached."""
