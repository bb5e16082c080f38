"""The application: routes for people, clients and monitoring."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Body, FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from starlette.routing import BaseRoute, Route

from vramcast.collocation.service import advice, answers, kubernetes_routes, pages, webhook
from vramcast.collocation.service.cluster_api import ClusterApi
from vramcast.collocation.service.engine import Engine, replies
from vramcast.collocation.service.guard import Guard
from vramcast.collocation.service.http import (
    PROBLEMS,
    ParsedRoute,
    add_error_handlers,
    engine_of,
    parsed_body,
    problem,
    reply,
)
from vramcast.collocation.service.loaded_checkpoint import Checkpoint, CheckpointProtocol
from vramcast.collocation.service.logs import LOGGER
from vramcast.collocation.service.metrics import ServiceMetrics
from vramcast.collocation.service.placements import placements
from vramcast.collocation.service.requests import (
    AdviceBody,
    ClassifyBody,
    JobsBody,
    ObservationListBody,
    ObservationsBody,
    PlacementBody,
    SolveBody,
)
from vramcast.collocation.service.settings import Settings
from vramcast.collocation.service.slurm import shards_text
from vramcast.device.profiles import device_names, load_profile
from vramcast.models.released import released_names
from vramcast.version import __version__
from vramcast.virtual_gpu.allocator.sizes import MIB

jobs = APIRouter(prefix="/v1", route_class=ParsedRoute, responses=PROBLEMS)
monitoring = APIRouter()


def _as_json(problem: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a problem of a path that answers with text: FastAPI would describe problems as text too."""
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {"description": problem["description"], "content": content, "model": None}


async def status_of(engine: Engine) -> dict[str, Any]:
    """Return the status of the checkpoint; a thread reads its files."""
    checkpoint = engine.checkpoint
    return await asyncio.to_thread(lambda: checkpoint.status)


@jobs.post("/classify", response_model=answers.AnswerReply | answers.AnswersReply)
async def classify(request: Request, body: Annotated[ClassifyBody, Body()]) -> Response:
    """Answer how much memory a job will take on a device. Each of several jobs has its own answer or problem."""
    engine = engine_of(request)
    if isinstance(body, JobsBody):
        outcomes = await asyncio.gather(*(engine.classify(job) for job in body.jobs), return_exceptions=True)
        good = not any(isinstance(item, BaseException) for item in outcomes)
        return reply({"answers": replies(outcomes)}, cacheable=good)
    return reply(await engine.classify(body))


@jobs.post(
    "/observations",
    response_model=answers.ObservationReply | answers.ObservationsReply,
    responses={507: {"model": answers.Problem, "description": "Not on the disk"}},
)
async def observe(request: Request, body: Annotated[ObservationsBody, Body()]) -> Response:
    """Store the observed peak of one or more jobs. Later reservations for a job are its highest peak and a margin.

    With `forget` in place of a peak, all observations of a job are removed.
    """
    engine = engine_of(request)
    if isinstance(body, ObservationListBody):
        return reply({"answers": replies(await engine.observe_all(body.observations))})
    return reply(await engine.observe(body))


@jobs.post("/placements", response_model=answers.PlacementsReply)
async def place(request: Request, body: Annotated[PlacementBody, Body()]) -> Response:
    """Rank the GPUs that have room for a job by a policy."""
    placed = await placements(engine_of(request), body)
    return reply(placed, cacheable=bool(placed["answers"]))  # without forecasts, the next reply may have some


@jobs.post(
    "/slurm",
    response_class=PlainTextResponse,
    responses={status: _as_json(item) for status, item in PROBLEMS.items()},
    openapi_extra={"requestBody": {"required": True, "content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def slurm(request: Request) -> Response:
    """Answer the job of a job script, sent as text, with lines of `key=value`, which Lua can read."""
    return PlainTextResponse(await shards_text(engine_of(request), await parsed_body(request)))


@jobs.get("/operations", response_model=answers.OperationsReply)
async def operations(request: Request) -> Response:
    """Return the queue of this process, and what the latest jobs took against their forecasts."""
    engine = engine_of(request)
    queue = {
        "traces": engine.traces.pool.waiting,
        "searches": engine.searches.running,
        "bodies": engine.parsers.waiting,
        "requests": int(request.app.state.metrics.gauge("vramcast_requests_in_flight")),
    }
    status = "starting" if not engine.ready else "degraded" if engine.reload_note else "ready"
    log = engine.operations.to_json()
    return reply({"status": status, "queue": queue, "observed_jobs": len(engine.history), **log})


@jobs.get("/checkpoints", response_model=answers.CheckpointsReply)
async def checkpoints(request: Request) -> Response:
    """List the estimator in use and the released ones."""
    return reply({"in_use": await status_of(engine_of(request)), "released": released_names()})


@jobs.post("/checkpoints/reload", response_model=answers.CheckpointReply, responses={403: PROBLEMS[401]})
async def reload(request: Request) -> Response:
    """Read the checkpoint again, as SIGHUP does. Needs a token."""
    if not engine_of(request).settings.token:
        return problem(403, "expected a service with a token for this, found none: send it SIGHUP instead")
    return reply(await engine_of(request).reload())


@jobs.get("/devices", response_model=answers.DevicesReply)
async def devices(request: Request) -> Response:
    """List the device profiles."""
    profiles = [
        {
            "name": item.name,
            "title": item.title,
            "total_mib": item.total_mib,
            "available_mib": item.available_bytes // MIB,
            "calibrated": item.calibrated_on is not None,
        }
        for item in map(load_profile, device_names())
    ]
    return reply({"default": engine_of(request).settings.device, "devices": profiles})


@jobs.post("/advice", response_model=answers.AdviceReply)
async def advise(request: Request, body: Annotated[AdviceBody, Body()]) -> Response:
    """Answer a job on every device, with the largest batch and changes that help, or with other strategies."""
    return reply(await advice.advice(engine_of(request), advice.check_traced(body.job)))


@jobs.post("/timeline", response_model=answers.TimelineReply)
async def timeline(request: Request, body: Annotated[AdviceBody, Body()]) -> Response:
    """Return the memory over the steps of a job, by use."""
    return reply(await advice.timeline(engine_of(request), advice.check_traced(body.job)))


@jobs.post("/solve", response_model=answers.SolutionReply)
async def solve(request: Request, body: Annotated[SolveBody, Body()]) -> Response:
    """Return the largest, least or cheapest value that fits, in place of the one that is to be found."""
    return reply(await advice.solution(engine_of(request), body))


@jobs.get("/networks", response_model=answers.NetworksReply)
async def networks(request: Request) -> Response:
    """List the networks that a job can name: `LIBRARY:NAME` as its target, or a prepared name."""
    engine = engine_of(request)
    return reply({"targets": await engine.traces.names(), "names": sorted(engine.named_specs)})


@monitoring.get("/healthz", response_model=answers.HealthReply)
async def healthz() -> Response:
    """Answer that the process is alive."""
    return reply({"status": "ok"})


@monitoring.get("/readyz", response_model=answers.ReadyReply, responses={503: {"model": answers.ReadyReply}})
async def readyz(request: Request) -> Response:
    """Answer whether jobs are answered; 'degraded' means that the checkpoint could not be loaded again."""
    engine = engine_of(request)
    if not engine.ready:
        return reply({"status": "starting", "checkpoint": None, "notes": []}, 503)
    status = await status_of(engine)
    notes = [note for note in (status["note"], engine.reload_note) if note]
    sound = status["on_disk"] in ("same", "changed") and engine.reload_note is None
    return reply({"status": "ready" if sound else "degraded", "checkpoint": status, "notes": notes})


@monitoring.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Return the metrics for Prometheus."""
    return Response(request.app.state.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _log_failure(starting: "asyncio.Task[None]") -> None:
    """Log why a service does not become ready."""
    if not starting.cancelled() and starting.exception() is not None:
        LOGGER.error("did not start", exc_info=starting.exception())


def path_of(route: BaseRoute) -> str:
    """Return the path of a route."""
    return route.path if isinstance(route, Route) else ""


def make_app(settings: Settings, load: Callable[[str], CheckpointProtocol] = Checkpoint) -> Guard:
    """Make the application behind its guard. A bad checkpoint fails here, before anything starts."""
    counters = ServiceMetrics()
    engine = Engine(settings, counters, load)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        starting = asyncio.create_task(engine.start())
        starting.add_done_callback(_log_failure)
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
    app.state.cluster_api = ClusterApi.of_environment()
    routers = [
        jobs,
        monitoring,
        pages.router,
        *([kubernetes_routes.router, webhook.router] if settings.kubernetes else []),
    ]
    for router in routers:
        app.include_router(router)
    add_error_handlers(app)
    return Guard(app, engine, [path_of(route) for router in routers for route in router.routes])
