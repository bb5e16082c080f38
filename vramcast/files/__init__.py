"""Reading and writing files: YAML, lines of JSON, and writes that survive a crash."""
