"""The tables of README.md and docs/collocation.md, and their picture."""
