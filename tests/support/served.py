"""The service without a network connection: requests go to the application, and traces run in this process."""

import asyncio
import json
import pickle
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from vramcast.collocation.service.app import make_app
from vramcast.collocation.service.guard import Guard
from vramcast.collocation.service.loaded_checkpoint import CheckpointProtocol, EstimatedJob, JobQuestion
from vramcast.collocation.service.server import HttpServer
from vramcast.collocation.service.settings import Settings
from vramcast.collocation.service.tracing import trace
from vramcast.models.answer import Answer, Bucket
from vramcast.virtual_gpu.allocator.sizes import MIB

MLP = {
    "family": "mlp",
    "network": {"arch": "pyramid", "input_features": 64, "output_features": 2, "depth": 2},
    "training": {"batch_size": 8},
}
TABLE = {
    "layers": [
        {"kind": "Linear", "output_shape": [10], "activations": 10, "parameters": 110},
        {"kind": "ReLU", "output_shape": [10], "activations": 10, "parameters": 0},
    ],
    "trainable_shapes": [[10, 10], [10]],
    "input_elements": 10,
}
SIMULATED = {
    "fits": True, "requested_bytes": 1000, "allocated_bytes": 2000, "reserved_bytes": 2**21, "workspace_bytes": 0
}  # fmt: skip
GPUMEMNET = "gpumemnet:input:784_output:10_depth:3_arch:pyramid_batch:64.out"


class Scripted:
    """An estimator whose answer is the static estimate, and whose safe answer is twice that; it records its batches."""

    def __init__(self, name: str = "scripted") -> None:
        self.name = name
        self.batches: list[int] = []
        self.note: str | None = None

    @property
    def status(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "content": "0" * 32,
            "loaded_at": "2026-01-01T00:00:00+00:00",
            "on_disk": "same",
            "note": self.note,
            "metrics": {},
        }

    def answers(self, questions: Sequence[JobQuestion]) -> list[EstimatedJob]:
        self.batches.append(len(questions))
        return [_estimated(item, self.name) for item in questions]


def _estimated(asked: JobQuestion, name: str) -> EstimatedJob:
    example = asked.question.example
    estimate_mib = (example.static.total_bytes + example.overhead_bytes) / MIB
    bucket = Bucket(index=0, lower_mib=0.0, upper_mib=float(asked.bucket_mib), probability=1.0)
    answer = Answer(
        target=asked.question.target,
        batch_size=example.training.batch_size,
        device=asked.question.profile.name,
        bucket=bucket,
        estimate_mib=estimate_mib,
        safe_mib=2 * estimate_mib,
        allocated_mib=None,
        reserved_mib=None,
        capacity_mib=example.capacity_bytes / MIB,
        oom_probability=0.0,
        risk=asked.risk,
        out_of_distribution=False,
        checkpoint=name,
        profile=asked.question.profile.title,
        seconds=0.0,
    )
    return EstimatedJob(answer, [dict(vars(bucket))] if asked.distribution else None)


class InProcess:
    """Replaces the worker processes."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.waiting = 0
        self.hold: asyncio.Event | None = None
        """Traces wait for this event, if there is one."""
        self.error: Exception | None = None

    async def start(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    async def run(self, function: Any, waiters: Any = None) -> Any:
        if function.func is trace:
            self.asked.append(function.args[0])
        if self.hold is not None:
            await self.hold.wait()
        if self.error is not None:
            raise self.error
        return function()

    async def run_pickled(self, function: Any, waiters: Any = None) -> bytes:
        return pickle.dumps(await self.run(function, waiters))


@dataclass
class Response:
    """A response."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Service:
    """A running application."""

    guard: Guard
    pool: InProcess

    @property
    def engine(self) -> Any:
        return self.guard.engine

    async def post(self, path: str, body: Any, **headers: str) -> Response:
        """Send a request with a body: JSON, or bytes as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.request("POST", path, [data], headers)

    async def get(self, path: str, **headers: str) -> Response:
        return await self.request("GET", path, [], headers)

    async def request(
        self,
        method: str,
        path: str,
        parts: Sequence[bytes],
        headers: dict[str, str],
        pause: Callable[[], Any] | None = None,
    ) -> Response:
        """Send a request whose body comes in parts, optionally with a pause before each."""
        given = {"content-type": "application/json", **{name.replace("_", "-"): text for name, text in headers.items()}}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(name.encode(), text.encode()) for name, text in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        rest, response = list(parts), Response()

        async def receive() -> dict[str, Any]:
            if pause is not None:
                await pause()
            if not rest and parts:
                await asyncio.Event().wait()
            body = rest.pop(0) if rest else b""
            return {"type": "http.request", "body": body, "more_body": bool(rest)}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                response.status = message["status"]
                response.headers = {name.decode(): text.decode() for name, text in message["headers"]}
            else:
                response.body += message.get("body", b"")

        await self.guard(scope, receive, send)
        return response


@contextmanager
def on_loopback(settings: Settings, load: Callable[[str], CheckpointProtocol] = Scripted) -> Iterator[str]:
    """Yield the URL of a service with a port, in a thread of this process."""
    guard = make_app(settings, load)
    guard.engine.traces.pool, guard.engine.parsers = InProcess(), InProcess()  # type: ignore[assignment]
    server = HttpServer(settings, guard)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not (server.started and guard.engine.ready):
            if not thread.is_alive():
                raise RuntimeError("the service did not start")
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


@asynccontextmanager
async def serving(
    settings: Settings | None = None, load: Callable[[str], CheckpointProtocol] | None = None
) -> AsyncIterator[Service]:
    """Yield a service that has started."""
    guard = make_app(settings or Settings(), load or Scripted)
    pool = InProcess()
    guard.engine.traces.pool, guard.engine.parsers = pool, InProcess()  # type: ignore[assignment]
    async with guard.app.router.lifespan_context(guard.app):  # type: ignore[attr-defined]
        while not guard.engine.ready:
            await asyncio.sleep(0)
        yield Service(guard, pool)
