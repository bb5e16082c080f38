"""Recordings of real GPUs beside the virtual GPU."""
