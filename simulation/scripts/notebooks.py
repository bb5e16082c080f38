"""Notebooks as scripts: the source of the code cells, without the commands of IPython."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vramcast.errors import UserError

_SKIPPED = ("%%bash", "%%sh", "%%html", "%%javascript", "%%js", "%%latex", "%%markdown", "%%writefile", "%%script")
"""Magics whose cells hold no Python."""


def notebook_source(path: Path, parameters: Sequence[tuple[str, str]] = ()) -> str:
    """Return the Python source of a notebook; `parameters` follow the cell tagged so, as papermill writes them."""
    try:
        cells: Any = json.loads(path.read_text(encoding="utf-8"))["cells"]
        codes = [cell for cell in cells if cell["cell_type"] == "code"]
        sources = [_python(_text(cell)) for cell in codes]
        tagged = [index for index, cell in enumerate(codes) if "parameters" in cell.get("metadata", {}).get("tags", ())]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"expected a notebook of format 4 in {path}, found: {error!r}; open and save it") from error
    if parameters:
        sources.insert(tagged[0] + 1 if tagged else 0, "".join(f"{name} = {value}\n" for name, value in parameters))
    return "\n".join(["display = print", *sources]) + "\n"


def _text(cell: Mapping[str, Any]) -> str:
    source = cell["source"]
    return source if isinstance(source, str) else "".join(source)


def _python(source: str) -> str:
    """Comment out the lines of IPython: magics, commands of a shell, and questions."""
    if source.lstrip().startswith(_SKIPPED):
        return "".join(f"# {line}\n" for line in source.splitlines())
    return "\n".join(_python_line(line) for line in source.splitlines())


def _python_line(line: str) -> str:
    bare = line.lstrip()
    indent = line[: len(line) - len(bare)]
    if bare.startswith("%env ") and "=" in bare:
        name, _, value = bare.removeprefix("%env ").partition("=")
        return f"{indent}__import__('os').environ[{name.strip()!r}] = {value.strip()!r}"
    if bare.startswith(("%", "!", "?")) or bare.rstrip().endswith("?"):
        return f"{indent}pass  # {bare}"
    return line
