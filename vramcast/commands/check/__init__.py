"""`vramcast check`: the checks, the baseline file, and the command."""
