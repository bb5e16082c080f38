"""Commands that produce the figures of the documentation."""
