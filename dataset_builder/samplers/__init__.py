"""Samplers: which configurations are looked at."""
