"""Simulation of jobs on the virtual GPU, in this process or in a child process that runs a user's code."""
