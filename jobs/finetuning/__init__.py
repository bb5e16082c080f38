"""Adapters, quantized bases and optimizers with few bits."""
