"""`vramcast device`."""
