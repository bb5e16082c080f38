"""A job and GPUs from a request: what it needs on each kind of card, and where that is free."""

from collections.abc import Mapping
from typing import Any

from vramcast.collocation.placement import GpuState, rank, refusals
from vramcast.collocation.service.engine import Engine
from vramcast.collocation.service.estimating import Estimated, Seen
from vramcast.collocation.service.requests import PlacementBody
from vramcast.collocation.service.trace_pool import OverloadedError, PoolError
from vramcast.dataset_builder.devices import load_profile
from vramcast.errors import UserError


async def placements(engine: Engine, body: PlacementBody) -> dict[str, Any]:
    """The reply to a placement request."""
    found = await _found(engine, body)
    gpus = [
        GpuState(item.id, item.free_mib, _total(item.total_mib, found[item.device]), item.device, item.node, item.jobs)
        for item in body.gpus
    ]
    need = needs(found, body.margin_mib)
    return {
        "policy": body.policy,
        "placements": [
            {
                "gpu": item.gpu.id,
                "node": item.gpu.node,
                "need_mib": round(item.need_mib, 1),
                "left_mib": round(item.left_mib, 1),
                "basis": found[item.gpu.device].basis,
            }
            for item in rank(need, gpus, body.policy)
        ],
        "refused": [
            {"gpu": item.gpu.id, "node": item.gpu.node, "reason": item.reason, "for_good": item.for_good}
            for item in refusals(need, gpus, body.policy)
        ],
        "answers": {item.device: item.to_json() for item in found.values() if isinstance(item, Estimated)},
    }


async def _found(engine: Engine, body: PlacementBody) -> Mapping[str | None, Estimated | Seen]:
    """Forecasts for whoever wants to see them; without any, what is known of the job will do."""
    devices = {gpu.device for gpu in body.gpus}
    try:
        return await engine.estimates(body.job, devices)
    except (UserError, OverloadedError, PoolError):
        seen = await engine.seen(body.job, devices)
        if seen is None:
            raise
        return seen


def needs(found: Mapping[str | None, Estimated | Seen], margin_mib: float = 0.0) -> dict[str | None, float]:
    """What to set aside on each device, and a margin of the asker's."""
    return {device: item.need_mib + margin_mib for device, item in found.items()}


def _total(stated_mib: float | None, found: Estimated | Seen) -> float:
    return load_profile(found.device).total_mib if stated_mib is None else stated_mib
