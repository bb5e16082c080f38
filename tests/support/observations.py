"""Observations over HTTP, for tests."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from served import MLP, Service, serving

from vramcast.collocation.service.settings import Settings

JOB = {"spec": MLP, "device": "t4"}


def run(scenario: Callable[[Service], Awaitable[None]], settings: Settings | None = None) -> None:
    async def whole() -> None:
        async with serving(settings) as service:
            await scenario(service)

    asyncio.run(whole())


async def observe(service: Service, job: Any, peak_mib: float, **more: Any) -> dict[str, Any]:
    response = await service.post("/v1/observations", {"job": job, "peak_mib": peak_mib, **more})
    assert response.status == 200, response.body
    return dict(response.json)


async def classify(service: Service, job: Any) -> dict[str, Any]:
    response = await service.post("/v1/classify", job)
    assert response.status == 200, response.body
    return dict(response.json)


async def runs(service: Service, job: Any) -> int:
    observed = (await classify(service, job))["observed"]
    return observed["runs"] if observed else 0
