"""The token of a service: from a file or the environment, because everyone can read a command line."""

import os
from pathlib import Path

from vramcast.errors import UserError

TOKEN = "VRAMCAST_TOKEN"  # noqa: S105 - the name of a variable


def read_token(path: Path | None) -> str | None:
    """Return the token, or None if there is neither a file nor the variable."""
    if path is None:
        return os.environ.get(TOKEN) or None
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"expected a token in {path}, found: {error}; check --token-file") from error
    if not token:
        raise UserError(f"expected a token in {path}, found an empty file: write one into it")
    return token
