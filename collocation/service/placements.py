"""The reply to a placement request: the need of a job on each device, and the GPUs that have room for it."""

from collections.abc import Mapping
from typing import Any

from vramcast.collocation.placement import GpuState, rank, refusals
from vramcast.collocation.service.engine import Engine
from vramcast.collocation.service.loaded_checkpoint import EstimatedJob, ObservedJob
from vramcast.collocation.service.requests import PlacementBody
from vramcast.collocation.service.worker_pool import OverloadedError, PoolError
from vramcast.device.profiles import load_profile
from vramcast.errors import UserError

_INLINE_GPUS = 500
"""The reply for more GPUs is made outside of the event loop."""


async def placements(engine: Engine, body: PlacementBody) -> dict[str, Any]:
    """Return the reply to a placement request."""
    by_device = await _forecast_or_seen(engine, body)
    if len(body.gpus) <= _INLINE_GPUS:
        return _reply(body, by_device)
    return await engine.batcher.call(_reply, body, by_device)


def _reply(body: PlacementBody, by_device: Mapping[str | None, EstimatedJob | ObservedJob]) -> dict[str, Any]:
    gpus = [
        GpuState(
            item.id, item.free_mib, _total(item.total_mib, by_device[item.device]), item.device, item.node, item.jobs
        )
        for item in body.gpus
    ]
    need = needs(by_device, body.margin_mib)
    return {
        "policy": body.policy,
        "placements": [
            {
                "gpu": item.gpu.id,
                "node": item.gpu.node,
                "need_mib": round(item.need_mib, 1),
                "left_mib": round(item.left_mib, 1),
                "basis": by_device[item.gpu.device].basis,
            }
            for item in rank(need, gpus, body.policy)
        ],
        "refused": [
            {"gpu": item.gpu.id, "node": item.gpu.node, "reason": item.reason, "for_good": item.for_good}
            for item in refusals(need, gpus, body.policy)
        ],
        "answers": {item.device: item.to_json() for item in by_device.values() if isinstance(item, EstimatedJob)},
    }


async def _forecast_or_seen(engine: Engine, body: PlacementBody) -> Mapping[str | None, EstimatedJob | ObservedJob]:
    """Return forecasts by device, or if there are none, the observations of the job."""
    devices = {gpu.device for gpu in body.gpus}
    try:
        return await engine.estimates(body.job, devices)
    except (UserError, OverloadedError, PoolError):
        seen = await engine.seen(body.job, devices)
        if seen is None:
            raise
        return seen


def needs(
    by_device: Mapping[str | None, EstimatedJob | ObservedJob], margin_mib: float = 0.0
) -> dict[str | None, float]:
    """Return the need on each device with the client's own margin."""
    return {device: item.need_mib + margin_mib for device, item in by_device.items()}


def _total(stated_mib: float | None, need: EstimatedJob | ObservedJob) -> float:
    return load_profile(need.device).total_mib if stated_mib is None else stated_mib
