"""Simulates a cluster in which jobs share GPUs, to show how much an estimator helps a scheduler."""
