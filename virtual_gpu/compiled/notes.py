"""Sentences about compiled code in the notes of a trace, which widen the bounds of an answer."""

FUSION = (
    "compiled code is simulated by torch's own graphs and partitioner; which results exist between kernels is a rule "
    "for Inductor's fusion"
)
MADE = "torch.compile made "
"""The beginning of the note that says what was compiled."""


def is_compiler_note(text: str) -> bool:
    """Return whether a note is about code that was compiled."""
    return text == FUSION or text.startswith(MADE)
