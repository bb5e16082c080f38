"""The job argument of a command."""

import sys
from pathlib import Path
from typing import Any

from vramcast.collocation.adapters.job_text import job_of_text, options_of_text
from vramcast.errors import UserError
from vramcast.jobs.code_files import changed_files
from vramcast.jobs.network_files.description import NetworkDescription
from vramcast.jobs.network_files.reading import read_network_file
from vramcast.jobs.targets import GPUMEMNET, LIBRARIES, is_file, parse_shape

FORMS = (
    "a spec as JSON, a file with one or with an export, gpumemnet:NAME, 'timm:resnet50 batch_size=32', "
    "'network.onnx batch_size=32', or - for stdin"
)

_NAMES = (GPUMEMNET, *(f"{library}:" for library in LIBRARIES))


def read_job(argument: str) -> dict[str, Any]:
    """Return the job as the service accepts it; a file without code becomes a layer table."""
    is_text = argument.lstrip().startswith("{") or argument.startswith(_NAMES)
    if " " in argument.strip() and not is_text and not is_file(argument):
        return _table_job(argument)
    job = job_of_text(_text(argument))
    if "export" in job:
        _compare_code(argument, job["export"])
    return job


def _compare_code(argument: str, export: dict[str, Any]) -> None:
    """Say on stderr which files of the code have changed since a job was exported."""
    hashes = export.get("code")
    if isinstance(hashes, dict) and (changed := changed_files(hashes, Path.cwd())):
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        print(f"vramcast: {changed[0]}{more} changed since {argument} was exported: export it again", file=sys.stderr)


def _table_job(argument: str) -> dict[str, Any]:
    path, options = options_of_text(argument)
    if not is_file(path):
        raise UserError(f"expected {FORMS}, found {argument[:100]!r}: check it")
    shape = str(options.pop("input", ""))
    network = read_network_file(Path(path), (parse_shape(shape)[0],) if shape else ())
    if not isinstance(network, NetworkDescription) or network.widest:
        raise UserError(
            f"expected a file with the layers of a network, found {path[:100]}, which has none: ask vramcast classify"
        )
    if "batch_size" not in options:
        raise UserError(f"expected batch_size=N after {path[:100]}, found none: add it")
    return {"table": network.table.to_json(), "training": options}


def _text(argument: str) -> str:
    """Return the argument itself, or the contents of a file."""
    if argument == "-":
        return sys.stdin.read()
    if argument.lstrip().startswith("{") or argument.startswith(_NAMES):
        return argument
    try:
        return Path(argument).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"expected {FORMS}, found {argument!r} ({error}): check it") from error
