"""`vramcast build` and its sub-commands."""
