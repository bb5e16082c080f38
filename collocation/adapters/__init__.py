"""Formats of other schedulers: pure translations, no HTTP."""
