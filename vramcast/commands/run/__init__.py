"""`vramcast run`."""
