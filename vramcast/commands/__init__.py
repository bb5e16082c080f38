"""The commands: their arguments, their pages and their exit codes."""
