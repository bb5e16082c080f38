"""The reply to Slurm's plugins: lines of key=value, because their Lua has no JSON parser."""

import math

from vramcast.collocation.service.engine import Engine
from vramcast.collocation.service.loaded_checkpoint import EstimatedJob
from vramcast.collocation.service.requests import AnyJobBody

SHARD_MIB = 1024
"""A shard stands for a GiB: Gres=gpu:2,shard:64 of a node gives 32 to each GPU."""


async def shards_text(engine: Engine, job: AnyJobBody) -> str:
    """Return the reservation for a job, the number of shards for it, and the most that its device has."""
    reservation = (await engine.reserve(job, {None}))[None]
    lines: dict[str, int | str] = {
        "need_mib": math.ceil(reservation.reservation_mib),
        "shards": _shards(reservation.reservation_mib),
        "gpu_shards": _shards(reservation.capacity_mib),
        "device": reservation.device,
        "basis": reservation.basis,
    }
    if isinstance(reservation, EstimatedJob):
        lines["estimate_mib"] = math.ceil(reservation.answer.estimate_mib)
        lines["verdict"] = reservation.answer.verdict.replace(" ", "_")
    return "".join(f"{key}={value}\n" for key, value in lines.items())


def _shards(mib: float) -> int:
    return max(1, math.ceil(mib / SHARD_MIB))
