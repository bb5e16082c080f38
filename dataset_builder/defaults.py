"""What all commands take where nobody says otherwise. The device is in `devices`, with the profiles."""

CHECKPOINT = "universal"
"""Of the released estimators."""
RISK = 0.01
"""How often a safe answer may be too low."""
BUCKET_MIB = 1024
"""The width of a bucket."""
SIMULATIONS = "runs/simulations"
"""Where simulated networks are kept, so that none is simulated twice."""
