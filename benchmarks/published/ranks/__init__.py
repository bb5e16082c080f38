"""Ranks of published runs on several GPUs: the networks that the sources trained, and the simulation of one rank."""
