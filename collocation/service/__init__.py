"""The HTTP service: how much memory a job needs, and where it fits."""
