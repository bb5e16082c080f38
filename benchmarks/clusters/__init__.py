"""Tests of the plugins under real schedulers on this machine: `make slurm`."""
