"""The service under load: `python -m benchmarks.performance.service_load`.

Measures requests per second of POST /v1/classify and of an empty FastAPI endpoint under the same server, over 32
connections; then the memory of the process before and after 100,000 requests. All on loopback.
"""

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

CONNECTIONS = 32
SOAK = 100_000
_WORKING_SET = 200
"""Jobs that are sent again and again, as schedulers do: at submission, and at every attempt to place them."""
_LEAST_RATIO = 0.5
_MOST_GROWTH = 1.1


def jobs(count: int, seed: int) -> list[bytes]:
    """Return requests for different MLPs."""
    draw = random.Random(seed)
    bodies = []
    for _ in range(count):
        network = {
            "arch": "pyramid",
            "input_features": draw.randrange(16, 4096),
            "output_features": draw.randrange(2, 100),
            "depth": draw.randrange(1, 6),
        }
        training = {"batch_size": draw.randrange(1, 1024)}
        bodies.append(json.dumps({"spec": {"family": "mlp", "network": network, "training": training}}).encode())
    return bodies


@dataclass
class Measured:
    """The measurements of one load."""

    requests: int
    seconds: float
    latencies: list[float]
    statuses: dict[int, int]

    @property
    def rate(self) -> float:
        return self.requests / self.seconds

    def percentile_ms(self, share: float) -> float:
        ordered = sorted(self.latencies)
        return 1000 * ordered[min(int(share * len(ordered)), len(ordered) - 1)]

    def line(self, title: str) -> str:
        p50, p99 = self.percentile_ms(0.5), self.percentile_ms(0.99)
        others = {status: count for status, count in self.statuses.items() if status != 200}
        return f"{title}: {self.rate:,.0f} requests a second, p50 {p50:.1f} ms, p99 {p99:.1f} ms" + (
            f", other answers: {others}" if others else ""
        )


class Load(asyncio.Protocol):
    """A connection that sends the next request after each response, with as little work as possible."""

    def __init__(
        self, path: str, next_body: Callable[[], bytes | None], done: asyncio.Future[None], run: Measured
    ) -> None:
        self.head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: ".encode()
        self.next_body = next_body
        self.done = done
        self.run = run
        self.buffer = b""
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self._ask()

    def _ask(self) -> None:
        body = self.next_body()
        if body is None:
            self.transport.close()
            return
        self.start = time.perf_counter()
        self.transport.write(self.head + str(len(body)).encode() + b"\r\n\r\n" + body)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, separator, rest = self.buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        if len(rest) < length:
            return
        self.buffer = b""
        self.run.latencies.append(time.perf_counter() - self.start)
        status = int(head[9:12])
        self.run.statuses[status] = self.run.statuses.get(status, 0) + 1
        self._ask()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


async def loaded(port: int, path: str, bodies: list[bytes], requests: int, connections: int) -> Measured:
    """Send a number of requests over all connections, with the bodies in turn."""
    loop, run, left = asyncio.get_running_loop(), Measured(requests, 0.0, [], {}), iter(range(requests))

    def next_body() -> bytes | None:
        index = next(left, None)
        return None if index is None else bodies[index % len(bodies)]

    start, ends = time.perf_counter(), []
    for _ in range(connections):
        ends.append(loop.create_future())
        await loop.create_connection(lambda end=ends[-1]: Load(path, next_body, end, run), "127.0.0.1", port)
    await asyncio.gather(*ends)
    run.seconds = time.perf_counter() - start
    if len(run.latencies) != requests:
        raise RuntimeError(f"{requests} requests, {len(run.latencies)} answers: a connection was lost")
    return run


EMPTY = """
import sys, uvicorn
from fastapi import FastAPI
from fastapi.responses import Response
app = FastAPI()

@app.post("/")
async def empty() -> Response:
    return Response(b"{}", media_type="application/json")

uvicorn.run(app, port=int(sys.argv[1]), access_log=False, log_level="error", loop="uvloop", http="httptools")
"""


@dataclass(frozen=True)
class ServerProcess:
    """The port and the process of a server."""

    port: int
    pid: int


@contextmanager
def process(words: list[str], ready: str) -> Iterator[ServerProcess]:
    """Start a server whose last argument is its port, and wait until it answers."""
    environment, port = {**os.environ, "OMP_NUM_THREADS": "1"}, free_port()
    with Path(os.devnull).open("wb") as nowhere:
        server = subprocess.Popen([sys.executable, *words, str(port)], stderr=nowhere, stdout=nowhere, env=environment)
        try:
            _wait_for(server, port, ready)
            yield ServerProcess(port, server.pid)
        finally:
            server.terminate()
            server.wait(60)


def _wait_for(process: "subprocess.Popen[bytes]", port: int, path: str) -> None:
    until = time.monotonic() + 180
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {process.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
                if response.status == 200:
                    return
        except urllib.error.HTTPError as error:
            if error.code == 405:  # the empty endpoint accepts POST alone
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise RuntimeError("the server did not become ready")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, which depends less on the load of the machine than wall time."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ask(port: int, path: str, bodies: list[bytes], requests: int, connections: int = CONNECTIONS) -> Measured:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(loaded(port, path, bodies, requests, connections))


def main() -> int:
    """Print the figures. The exit code is 1 if a bound does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000, help="in each timed run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--soak", type=int, default=SOAK)
    arguments = parser.parse_args()
    bodies = jobs(_WORKING_SET, seed=0)
    with process(["-c", EMPTY], "/") as empty, process(["-m", "vramcast", "serve", "--port"], "/readyz") as service:
        cold = ask(service.port, "/v1/classify", bodies, len(bodies))
        print(cold.line(f"{len(bodies)} new networks"), flush=True)
        ratios = [_round(empty, service, bodies, arguments.requests) for _ in range(arguments.rounds)]
        growth = _soak(service, bodies, arguments.soak)
    ratio = sorted(ratios)[len(ratios) // 2]
    print(f"the service at {ratio:.2f} of an empty endpoint (at least {_LEAST_RATIO}); memory grew by {growth - 1:.1%}")
    return 0 if ratio >= _LEAST_RATIO and growth <= _MOST_GROWTH else 1


def _round(empty: ServerProcess, service: ServerProcess, bodies: list[bytes], requests: int) -> float:
    """Measure both in turn, since the load of a machine changes from minute to minute."""
    rates = []
    for server, path, title in (
        (empty, "/", "an empty endpoint"),
        (service, "/v1/classify", f"the service, {len(bodies)} networks again and again"),
    ):
        used = cpu_seconds(server.pid)
        load = ask(server.port, path, bodies, requests)
        cpu_us = 1e6 * (cpu_seconds(server.pid) - used) / requests
        print(f"{load.line(title)}, {cpu_us:.0f} us of CPU each", flush=True)
        rates.append(load.rate)
    return rates[1] / rates[0]


def _soak(service: ServerProcess, bodies: list[bytes], requests: int) -> float:
    """Send cached requests and, one in fifty, one that needs the estimator."""
    draw = random.Random(1)

    def fresh(body: bytes, index: int) -> bytes:
        job: dict[str, Any] = json.loads(body)
        return json.dumps({**job, "distribution": True}).encode() + b" " * index  # longer than any before

    mixed = [
        fresh(draw.choice(bodies), index // 50) if index % 50 == 0 else bodies[index % len(bodies)]
        for index in range(requests)
    ]
    half = len(mixed) // 2
    first = ask(service.port, "/v1/classify", mixed[:half], half)
    before = resident_mib(service.pid)
    second = ask(service.port, "/v1/classify", mixed[half:], len(mixed) - half)
    after = resident_mib(service.pid)
    print(first.line(f"a soak of {requests:,} requests, the first half"))
    print(second.line("the second half"))
    print(f"resident memory {before:.0f} MiB after the first half, {after:.0f} MiB after the second", flush=True)
    return after / before


if __name__ == "__main__":
    sys.exit(main())
