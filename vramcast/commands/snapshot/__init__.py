"""`vramcast snapshot`."""
