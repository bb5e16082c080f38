"""A line of a job script in, lines of key=value out: what Slurm's Lua needs, without a JSON parser there."""

import math

from pydantic import TypeAdapter, ValidationError

from vramcast.collocation.adapters.job_text import job_of_text
from vramcast.collocation.service.engine import Engine
from vramcast.collocation.service.estimating import Estimated
from vramcast.collocation.service.requests import AnyJobBody, JobBody
from vramcast.errors import UserError

SHARD_MIB = 1024
"""A shard stands for a GiB: Gres=gpu:2,shard:64 in gres.conf makes 32 of each card."""

_JOB: TypeAdapter[AnyJobBody] = TypeAdapter(JobBody)


def job_from_text(text: str) -> AnyJobBody:
    """A job as the service takes it, from an annotation, a comment or a script."""
    try:
        return _JOB.validate_python(job_of_text(text))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(item) for item in first["loc"])
        raise UserError(f"expected a job as /openapi.json tells, found at {where}: {first['msg']}; mend it") from error


async def shards_text(engine: Engine, body: bytes) -> str:
    """What to set aside, and how many shards that is."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise UserError("expected a job as UTF-8, found other bytes: mend it") from error
    found = (await engine.set_aside(job_from_text(text), {None}))[None]
    lines: dict[str, int | str] = {
        "need_mib": math.ceil(found.set_aside_mib),
        "shards": max(1, math.ceil(found.set_aside_mib / SHARD_MIB)),
        "device": found.device,
        "basis": found.basis,
    }
    if isinstance(found, Estimated):
        lines["estimate_mib"] = math.ceil(found.answer.estimate_mib)
        lines["verdict"] = found.answer.verdict.replace(" ", "_")
    return "".join(f"{key}={value}\n" for key, value in lines.items())
