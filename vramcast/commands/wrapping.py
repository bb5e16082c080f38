"""Wrapped lines of a page, in which shapes and names stay whole."""

import re
import textwrap

_INSIDE_SHAPE = re.compile(r"(?<=\d), (?=\d)")
_JOINED = ",\N{NO-BREAK SPACE}"
"""textwrap breaks lines at ASCII spaces alone."""


def wrapped(text: str, width: int, *, initial_indent: str = "", subsequent_indent: str = "") -> list[str]:
    """Return the lines of a text; none ends inside of a shape such as (8, 128), of a name, or at a hyphen."""
    lines = textwrap.wrap(
        _INSIDE_SHAPE.sub(_JOINED, text),
        width,
        initial_indent=initial_indent,
        subsequent_indent=subsequent_indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return [line.replace(_JOINED, ", ") for line in lines]
