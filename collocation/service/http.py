"""Connects FastAPI to the service: how bodies are parsed, and how errors become responses."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic_core import to_json
from starlette.exceptions import HTTPException

from vramcast.collocation.service.answers import Problem, problem_bytes
from vramcast.collocation.service.engine import Engine
from vramcast.collocation.service.guard import RETRY_SECONDS
from vramcast.collocation.service.history import NotStoredError
from vramcast.collocation.service.parsing import BadBodyError
from vramcast.collocation.service.worker_pool import OverloadedError, PoolError
from vramcast.errors import UserError

JSON = "application/json"
_LONGEST_SENTENCE = 500
"""A response does not repeat a long request."""
PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "No JSON"},
    401: {"model": Problem, "description": "No token, or another"},
    408: {"model": Problem, "description": "Sent too slowly"},
    413: {"model": Problem, "description": "Too large"},
    422: {"model": Problem, "description": "Not a job that can be answered"},
    503: {"model": Problem, "description": "Come back later"},
}
Handler = Callable[[Request], Awaitable[Response]]


class ParsedRequest(Request):
    """A request whose JSON is the checked value of its path: FastAPI has nothing left to validate."""

    async def json(self) -> Any:
        """Return the checked body."""
        try:
            return await parsed_body(self)
        except Exception as error:
            raise _ParseError(error) from error


class _ParseError(HTTPException):
    """Carries an error of parsing through FastAPI, which turns all but its own exceptions into a plain 400."""

    def __init__(self, error: Exception) -> None:
        super().__init__(400)
        self.error = error


class ParsedRoute(APIRoute):
    """A route whose body is parsed by `parsing`, for large bodies in a worker process."""

    def get_route_handler(self) -> Handler:  # type: ignore[override]
        """Return FastAPI's own handler for a parsed request."""
        inner = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await inner(ParsedRequest(request.scope, request.receive))
            except _ParseError as carried:
                raise carried.error from None

        return handle


def engine_of(request: Request) -> Engine:
    """Return what all requests share."""
    engine: Engine = request.app.state.engine
    return engine


async def parsed_body(request: Request) -> Any:
    """Return the checked body of a request."""
    return await engine_of(request).parse(request.url.path, await request.body())


def reply(value: Any, status: int = 200, cacheable: bool = True) -> Response:
    """Return a value as JSON, which the response cache may keep."""
    headers = None if cacheable else {"cache-control": "no-store"}
    return Response(to_json(value, inf_nan_mode="null"), status, media_type=JSON, headers=headers)


def problem(status: int, sentence: str, where: str | None = None, headers: dict[str, str] | None = None) -> Response:
    """Return a problem."""
    return Response(problem_bytes(sentence[:_LONGEST_SENTENCE], where), status, media_type=JSON, headers=headers)


def add_error_handlers(app: FastAPI) -> None:
    """Answer every error with a problem and its sentence."""

    @app.exception_handler(UserError)
    async def bad_input(_: Request, error: UserError) -> Response:
        return problem(422, str(error))

    @app.exception_handler(BadBodyError)
    async def bad_body(_: Request, error: BadBodyError) -> Response:
        return problem(error.status, str(error), error.where)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        """Answer a body of another content type: `parsing` checks JSON."""
        first = error.errors()[0]
        where = ".".join(str(item) for item in first["loc"])[:200]
        return problem(
            422, f"expected a request as described in /openapi.json, found at {where}: {first['msg']}", where
        )

    @app.exception_handler(HTTPException)
    async def other(_: Request, error: HTTPException) -> Response:
        return problem(error.status_code, str(error.detail), headers=dict(error.headers or {}))

    @app.exception_handler(OverloadedError)
    @app.exception_handler(PoolError)
    async def overloaded(_: Request, error: Exception) -> Response:
        reason = "no worker process" if isinstance(error, PoolError) else "more jobs than can be answered soon"
        sentence = f"expected a service with room for this request, found {reason}: come back"
        return problem(503, sentence, headers={"Retry-After": str(RETRY_SECONDS)})

    @app.exception_handler(NotStoredError)
    async def not_stored(_: Request, error: NotStoredError) -> Response:
        return problem(507, str(error))

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> Response:
        return problem(500, "expected to answer, found an error of the service's own: see its log")
