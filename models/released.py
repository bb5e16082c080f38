"""Names of checkpoints. Imports no torch, so that a command refuses a wrong name before it starts anything."""

from contextlib import suppress
from pathlib import Path

from vramcast.errors import UserError, suggestion

RELEASED = Path(__file__).resolve().parent.parent / "checkpoints"


def released_names() -> list[str]:
    """Return the names of the released checkpoints."""
    return sorted(path.name for path in RELEASED.iterdir() if path.is_dir()) if RELEASED.is_dir() else []


def checkpoint_directory(name: str) -> Path:
    """Return the directory of a checkpoint, by its path or its released name."""
    for directory in (Path(name), RELEASED / name):
        with suppress(OSError):  # a name that is too long for a path
            if directory.is_dir():
                return directory
    hint = suggestion(name, released_names(), "name another")
    raise UserError(
        f"expected a checkpoint's directory or a released one of {released_names()}, found {name!r}: {hint}"
    )
