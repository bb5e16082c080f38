"""A job as text, for an annotation, a comment or a line of a script."""

import ast
import json
import shlex
from typing import Any

from vramcast.errors import UserError
from vramcast.jobs.targets import LIBRARIES

_LONGEST = 200_000
"""Kubernetes allows 256 KiB for all annotations of an object (apimachinery, validation/objectmeta.go)."""

FORMAT = "vramcast_job"
"""The key of an exported job (simulation/exported_job.py), named here because clients import nothing of it."""
_LONGEST_NUMBER = 20


def job_of_text(text: str) -> dict[str, Any]:
    """Return the job as /v1/classify accepts it, from a name, a spec, or any job as JSON.

    The name of a library's network is followed by options: 'timm:resnet50 batch_size=64 autocast=bf16 checkpointing'.
    """
    text = text.strip()
    if not text or len(text) > _LONGEST:
        raise UserError(f"expected a job of 1 to {_LONGEST} characters, found {len(text)}: write a name or a spec")
    if text.partition(":")[0] in LIBRARIES:
        return _target_job(text)
    if not text.startswith("{"):
        return {"name": text}
    try:
        job = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise UserError(f"expected a job as JSON or a name, found text that is neither ({error}): fix it") from error
    if FORMAT in job:
        return {"export": job}
    return {"spec": job} if "family" in job else dict(job)


def _target_job(text: str) -> dict[str, Any]:
    target, options = options_of_text(text)
    return {"target": target, **options}


def options_of_text(text: str) -> tuple[str, dict[str, Any]]:
    """Return the first word of a text, and the options after it: 'network.onnx batch_size=64 checkpointing'."""
    try:
        target, *words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"expected options such as batch_size=64, found open quotes ({error}): close them") from error
    job: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not name.isidentifier() or name in (*job, "target"):
            raise UserError(
                f"expected options such as batch_size=64 after {target[:100]}, each once, found {word[:100]!r}: "
                "write name=value"
            )
        job[name] = _literal(value) if equals else True
    return target, job


def _literal(text: str) -> Any:
    """Return a number or a truth value, or the text itself."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = ast.literal_eval(text) if len(text) <= _LONGEST_NUMBER else text
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return value if isinstance(value, int | float) else text


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number")
