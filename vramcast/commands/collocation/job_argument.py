"""The job argument of a command."""

import sys
from pathlib import Path
from typing import Any

from vramcast.collocation.adapters.job_text import job_of_text
from vramcast.errors import UserError
from vramcast.jobs.targets import GPUMEMNET

FORMS = "a spec as JSON, a file with one, gpumemnet:NAME, or - for stdin"


def read_job(argument: str) -> dict[str, Any]:
    """Return the job as the service accepts it."""
    return job_of_text(_text(argument))


def _text(argument: str) -> str:
    """Return the argument itself, or the contents of a file."""
    if argument == "-":
        return sys.stdin.read()
    if argument.lstrip().startswith("{") or argument.startswith(GPUMEMNET):
        return argument
    try:
        return Path(argument).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"expected a spec, a file with one, or gpumemnet:NAME, found {argument!r} ({error}): check it"
        ) from error
