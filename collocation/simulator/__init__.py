"""A cluster in which jobs share GPUs, simulated: what an estimator is worth to a scheduler."""
