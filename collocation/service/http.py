"""How requests become calls, and how errors become answers: strict JSON, and one form of problems."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic_core import from_json, to_json
from starlette.exceptions import HTTPException

from vramcast.collocation.service.answers import Problem, problem_bytes
from vramcast.collocation.service.engine import Engine
from vramcast.collocation.service.guard import RETRY_SECONDS
from vramcast.collocation.service.history_file import NotStoredError
from vramcast.collocation.service.trace_pool import OverloadedError, PoolError
from vramcast.errors import UserError

JSON = "application/json"
_LONGEST = 500
"""Of a sentence that goes back: what was sent is not to come back whole."""
PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "No JSON"},
    401: {"model": Problem, "description": "No token, or another"},
    408: {"model": Problem, "description": "Sent too slowly"},
    413: {"model": Problem, "description": "Too large"},
    422: {"model": Problem, "description": "Nothing that can be answered"},
    503: {"model": Problem, "description": "Come back later"},
}
Handler = Callable[[Request], Awaitable[Response]]


class StrictRequest(Request):
    """JSON as its standard has it: no NaN, no infinity, no nesting without end (jiter stops at 200 levels)."""

    async def json(self) -> Any:
        """The parsed body."""
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise HTTPException(400, f"expected JSON, found {error}: mend it") from error


class StrictRoute(APIRoute):
    """A route that reads strictly."""

    def get_route_handler(self) -> Handler:  # type: ignore[override]
        """FastAPI's own handler behind a strict request."""
        inner = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await inner(StrictRequest(request.scope, request.receive))

        return handle


def engine_of(request: Request) -> Engine:
    """What all requests share."""
    engine: Engine = request.app.state.engine
    return engine


def reply(value: Any, status: int = 200, kept: bool = True) -> Response:
    """A value as JSON, which may be kept where its path is."""
    headers = None if kept else {"cache-control": "no-store"}
    return Response(to_json(value), status, media_type=JSON, headers=headers)


def problem(status: int, sentence: str, where: str | None = None, headers: dict[str, str] | None = None) -> Response:
    """A problem in its one form."""
    return Response(problem_bytes(sentence[:_LONGEST], where), status, media_type=JSON, headers=headers)


def add_error_handlers(app: FastAPI) -> None:
    """Every error is a problem with a sentence."""

    @app.exception_handler(UserError)
    async def bad_input(_: Request, error: UserError) -> Response:
        return problem(422, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(item) for item in first["loc"])[:200]
        more = f" (and {len(error.errors()) - 1} more)" if len(error.errors()) > 1 else ""
        return problem(422, f"expected a request as /openapi.json tells, found at {where}: {first['msg']}{more}", where)

    @app.exception_handler(HTTPException)
    async def other(_: Request, error: HTTPException) -> Response:
        return problem(error.status_code, str(error.detail), headers=dict(error.headers or {}))

    @app.exception_handler(OverloadedError)
    @app.exception_handler(PoolError)
    async def overloaded(_: Request, error: Exception) -> Response:
        found = "no worker process" if isinstance(error, PoolError) else "more networks than can be traced soon"
        sentence = f"expected work for which there is room, found {found}: come back"
        return problem(503, sentence, headers={"Retry-After": str(RETRY_SECONDS)})

    @app.exception_handler(NotStoredError)
    async def not_stored(_: Request, error: NotStoredError) -> Response:
        return problem(507, str(error))

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> Response:
        return problem(500, "expected to answer, found an error of the service's own: see its log")
