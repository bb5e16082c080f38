"""The files of a user's code: those that a script imports from its own folders, found by their syntax, with hashes."""

import ast
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_MOST_FILES = 500


def code_hashes(start: Path, root: Path) -> dict[str, str]:
    """Return the SHA-256 of a Python file and of the files that it imports, by their paths relative to a root.

    Imports are read, never run: a module that is named only at run time is not found.
    """
    folders = list(dict.fromkeys([start.resolve().parent, root.resolve()]))
    waiting, seen = [start.resolve()], dict[Path, None]()
    while waiting and len(seen) < _MOST_FILES:
        path = waiting.pop()
        if path not in seen:
            seen[path] = None
            waiting += _imported(path, folders)
    return {_name(path, root.resolve()): _sha256(path) for path in sorted(seen)}


def changed_files(hashes: Mapping[str, str], root: Path) -> list[str]:
    """Return the files that have changed since they were hashed, or are no longer there."""
    return [name for name, value in hashes.items() if not (root / name).is_file() or _sha256(root / name) != value]


def _name(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _imported(path: Path, folders: Sequence[Path]) -> Iterator[Path]:
    """Yield the files in some folders that a file imports."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                yield from _module(item.name, folders)
        elif isinstance(node, ast.ImportFrom):
            near = [path.parents[node.level - 1]] if 0 < node.level <= len(path.parents) else folders
            yield from _module(node.module or "", near)
            for item in node.names:
                yield from _module(f"{node.module}.{item.name}" if node.module else item.name, near)


def _module(name: str, folders: Sequence[Path]) -> Iterator[Path]:
    """Yield the file of a module, and those of the packages around it."""
    parts = [part for part in name.split(".") if part]
    for folder in folders:
        for length in range(1, len(parts) + 1):
            place = folder.joinpath(*parts[:length])
            for candidate in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
                if candidate.is_file():
                    yield candidate.resolve()
