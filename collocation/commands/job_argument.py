"""A job as it is given on a command line."""

import sys
from pathlib import Path
from typing import Any

from vramcast.collocation.adapters.job_text import job_of_text
from vramcast.dataset_builder.jobs.targets import GPUMEMNET
from vramcast.errors import UserError

FORMS = "a spec as JSON, a file with one, gpumemnet:NAME, or - for stdin"


def read_job(given: str) -> dict[str, Any]:
    """The job as the service takes it."""
    return job_of_text(_text(given))


def _text(given: str) -> str:
    """A job as it stands, or the contents of a file."""
    if given == "-":
        return sys.stdin.read()
    if given.lstrip().startswith("{") or given.startswith(GPUMEMNET):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"expected a spec, a file with one, or gpumemnet:NAME, found {given!r} ({error}): check it"
        ) from error
