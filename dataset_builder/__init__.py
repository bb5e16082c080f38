"""Produces rows: configurations of networks, and the GPU memory that each of them takes."""
