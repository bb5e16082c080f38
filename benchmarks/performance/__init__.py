"""Timings of the builder, the estimators, the service and the simulator (`make bench`)."""
