"""Figures that the documentation quotes, each by one command."""
