"""A job as text, for an annotation, a comment or a line of a script."""

import json
from typing import Any

from vramcast.errors import UserError

_LONGEST = 200_000
"""Kubernetes allows 256 KiB for all annotations of an object (apimachinery, validation/objectmeta.go)."""


def job_of_text(text: str) -> dict[str, Any]:
    """Return the job as /v1/classify accepts it, from a name, a spec, or any job as JSON."""
    text = text.strip()
    if not text or len(text) > _LONGEST:
        raise UserError(f"expected a job of 1 to {_LONGEST} characters, found {len(text)}: write a name or a spec")
    if not text.startswith("{"):
        return {"name": text}
    try:
        job = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise UserError(f"expected a job as JSON or a name, found text that is neither ({error}): fix it") from error
    return {"spec": job} if "family" in job else dict(job)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number")
