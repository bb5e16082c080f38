"""Attacks on the service and the cluster simulator, with the bounds that must hold (`make soak`)."""
