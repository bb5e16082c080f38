"""Recordings of real allocators: memory snapshots of torch, their start state, and their replay."""
