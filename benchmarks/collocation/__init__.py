"""The tables and the picture of docs/collocation.md."""
