"""The HTTP service: what a job will take, and where it fits."""
