"""The application: routes for people, clients and machines that watch."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Body, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse
from starlette.routing import BaseRoute, Route

from vramcast import __version__
from vramcast.collocation.service import answers, kubernetes_routes
from vramcast.collocation.service.engine import Engine, many
from vramcast.collocation.service.estimating import Checkpoint, Estimating
from vramcast.collocation.service.guard import Guard
from vramcast.collocation.service.http import PROBLEMS, StrictRoute, add_error_handlers, engine_of, problem, reply
from vramcast.collocation.service.logs import LOGGER
from vramcast.collocation.service.metrics import ServiceMetrics
from vramcast.collocation.service.placements import placements
from vramcast.collocation.service.requests import (
    ClassifyBody,
    JobsBody,
    ObservationListBody,
    ObservationsBody,
    PlacementBody,
)
from vramcast.collocation.service.settings import Settings
from vramcast.collocation.service.slurm import shards_text
from vramcast.dataset_builder.devices import device_names, load_profile
from vramcast.models.checkpoint import RELEASED
from vramcast.virtual_gpu.sizes import MIB

_PAGE = Path(__file__).with_name("page.html")
jobs = APIRouter(prefix="/v1", route_class=StrictRoute, responses=PROBLEMS)
watching = APIRouter()


def _as_json(problem: Mapping[str, Any]) -> dict[str, Any]:
    """A problem of a path whose answers are text: FastAPI would say that problems are too."""
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {"description": problem["description"], "content": content, "model": None}


async def status_of(engine: Engine) -> dict[str, Any]:
    """Of the checkpoint; its files are looked at, so not in the event loop."""
    checkpoint = engine.checkpoint
    return await asyncio.to_thread(lambda: checkpoint.status)


@jobs.post("/classify", response_model=answers.AnswerReply | answers.AnswersReply)
async def classify(request: Request, body: Annotated[ClassifyBody, Body()]) -> Response:
    """How much memory a job will take on a device; or several jobs, each with an answer or a problem of its own."""
    engine = engine_of(request)
    if isinstance(body, JobsBody):
        outcomes = await asyncio.gather(*(engine.classify(job) for job in body.jobs), return_exceptions=True)
        return reply({"answers": many(outcomes)}, kept=not any(isinstance(item, Exception) for item in outcomes))
    return reply(await engine.classify(body))


@jobs.post(
    "/observations",
    response_model=answers.ObservationReply | answers.ObservationsReply,
    responses={507: {"model": answers.Problem, "description": "Not on the disk"}},
)
async def observe(request: Request, body: Annotated[ObservationsBody, Body()]) -> Response:
    """What a job took, or several: from then on that is set aside for it, and a margin. Answers what is now known.

    With `forget` in the place of a peak all of it is taken back.
    """
    engine = engine_of(request)
    if isinstance(body, ObservationListBody):
        return reply({"answers": many(await engine.observe_all(body.observations))})
    return reply(await engine.observe(body))


@jobs.post("/placements", response_model=answers.PlacementsReply)
async def place(request: Request, body: Annotated[PlacementBody, Body()]) -> Response:
    """On which of the GPUs the job fits with what is free there, ranked by a policy."""
    found = await placements(engine_of(request), body)
    return reply(found, kept=bool(found["answers"]))  # another time there may be forecasts


@jobs.post(
    "/slurm",
    response_class=PlainTextResponse,
    responses={status: _as_json(item) for status, item in PROBLEMS.items()},
    openapi_extra={"requestBody": {"required": True, "content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def slurm(request: Request) -> Response:
    """What a job script says of its network, as text: lines of `key=value`, which Lua can read."""
    return PlainTextResponse(await shards_text(engine_of(request), await request.body()))


@jobs.get("/checkpoints", response_model=answers.CheckpointsReply)
async def checkpoints(request: Request) -> Response:
    """The estimator in use, and those that were released."""
    released = sorted(path.name for path in RELEASED.iterdir() if path.is_dir()) if RELEASED.is_dir() else []
    return reply({"in_use": await status_of(engine_of(request)), "released": released})


@jobs.post("/checkpoints/reload", response_model=answers.CheckpointReply, responses={403: PROBLEMS[401]})
async def reload(request: Request) -> Response:
    """Read the checkpoint again, as SIGHUP does. Only for holders of the token."""
    if not engine_of(request).settings.token:
        return problem(403, "expected a service with a token for this, found none: send it SIGHUP instead")
    return reply(await engine_of(request).reload())


@jobs.get("/devices", response_model=answers.DevicesReply)
async def devices(request: Request) -> Response:
    """All device profiles that a job can be answered for."""
    found = [load_profile(name) for name in device_names()]
    shown = [
        {
            "name": item.name,
            "title": item.title,
            "total_mib": item.total_mib,
            "available_mib": item.available_bytes // MIB,
            "calibrated": item.calibrated_on is not None,
        }
        for item in found
    ]
    return reply({"default": engine_of(request).settings.device, "devices": shown})


@watching.get("/healthz", response_model=answers.HealthReply)
async def healthz() -> Response:
    """Whether the process answers."""
    return reply({"status": "ok"})


@watching.get("/readyz", response_model=answers.ReadyReply, responses={503: {"model": answers.ReadyReply}})
async def readyz(request: Request) -> Response:
    """Whether jobs are answered; 'degraded' where the checkpoint that answers could not be loaded again."""
    engine = engine_of(request)
    if not engine.ready:
        return reply({"status": "starting", "checkpoint": None, "notes": []}, 503)
    status = await status_of(engine)
    notes = [note for note in (status["note"], engine.reload_note) if note]
    sound = status["on_disk"] in ("same", "changed") and engine.reload_note is None
    return reply({"status": "ready" if sound else "degraded", "checkpoint": status, "notes": notes})


@watching.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    return Response(request.app.state.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@watching.get("/", response_class=HTMLResponse, include_in_schema=False)
async def page() -> Response:
    """For people."""
    return HTMLResponse(_PAGE.read_bytes())


def _tell_failure(starting: "asyncio.Task[None]") -> None:
    """A service that does not become ready says why."""
    if not starting.cancelled() and starting.exception() is not None:
        LOGGER.error("did not start", exc_info=starting.exception())


def path_of(route: BaseRoute) -> str:
    """The path of a route."""
    return route.path if isinstance(route, Route) else ""


def make_app(settings: Settings, load: Callable[[str], Estimating] = Checkpoint) -> Guard:
    """The application behind its guard; a bad checkpoint is told here, before anything starts."""
    counters = ServiceMetrics()
    engine = Engine(settings, counters, load)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        starting = asyncio.create_task(engine.start())
        starting.add_done_callback(_tell_failure)
        try:
            yield
        finally:
            starting.cancel()
            await engine.close()

    app = FastAPI(
        title="vramcast",
        version=__version__,
        description="Says, before a training job starts, how much GPU memory it will take.",
        lifespan=lifespan,
        docs_url=None,  # its page would load scripts from elsewhere
        redoc_url=None,
    )
    app.state.engine, app.state.metrics = engine, counters
    routers = [jobs, watching, *([kubernetes_routes.router] if settings.kubernetes else [])]
    for router in routers:
        app.include_router(router)
    add_error_handlers(app)
    return Guard(app, engine, [path_of(route) for router in routers for route in router.routes])
