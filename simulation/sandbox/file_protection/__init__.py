"""Protection of files from code that vramcast runs: its changes go to a scratch directory."""
