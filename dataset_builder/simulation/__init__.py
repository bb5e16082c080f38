"""Simulations of jobs: what the virtual GPU found, in this process or in a child that runs a user's code."""
