"""The token of a service: from a file or the environment, never from a command line, which everyone can read."""

import os
from pathlib import Path

from vramcast.errors import UserError

TOKEN = "VRAMCAST_TOKEN"  # noqa: S105 - the name of a variable


def read_token(path: Path | None) -> str | None:
    """None where there is neither a file nor the variable."""
    if path is None:
        return os.environ.get(TOKEN) or None
    try:
        found = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"expected a token in {path}, found: {error}; check --token-file") from error
    if not found:
        raise UserError(f"expected a token in {path}, found an empty file: write one into it")
    return found
