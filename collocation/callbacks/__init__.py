"""Callbacks of trainers that compare a real run with its forecast."""
