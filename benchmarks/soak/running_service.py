"""A service in its own process on 127.0.0.1, and a plain HTTP client for it."""

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"


@dataclass
class RunningService:
    """A service and its port."""

    process: "subprocess.Popen[bytes]"
    port: int

    def request(
        self, path: str, body: bytes | None = None, content_type: str = "application/json", seconds: float = 120
    ) -> tuple[int, bytes]:
        """Return the status and the body of a response."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=seconds)
        try:
            connection.request("POST" if body is not None else "GET", path, body, {"Content-Type": content_type})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def post(self, path: str, value: Any, seconds: float = 120) -> tuple[int, Any]:
        """Send JSON, and return the status and the parsed response."""
        status, body = self.request(path, json.dumps(value).encode(), seconds=seconds)
        return status, json.loads(body)

    def memory_mib(self) -> float:
        """Return the resident memory of the service without its workers."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text(encoding="utf-8").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextmanager
def running_service(log: Path, *options: str) -> Iterator[RunningService]:
    """Start a service, wait until it is ready, and kill it at the end."""
    words = [sys.executable, "-m", "vramcast", "serve", "--host", HOST, "--port", "0", "--quiet", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VRAMCAST_TOKEN": ""}
    log.parent.mkdir(parents=True, exist_ok=True)
    start_bytes = log.stat().st_size if log.exists() else 0
    with log.open("ab") as stderr:
        process = subprocess.Popen(words, stderr=stderr, stdout=subprocess.DEVNULL, env=environment)
    try:
        yield _ready(process, log, start_bytes)
    finally:
        process.kill()
        process.wait()


def _ready(process: "subprocess.Popen[bytes]", log: Path, start_bytes: int) -> RunningService:
    until = time.monotonic() + 300
    service = None
    while time.monotonic() < until and process.poll() is None:
        time.sleep(0.1)
        if service is None:
            lines = log.read_bytes()[start_bytes:].splitlines()
            ports = [json.loads(line)["port"] for line in lines if b'"serving"' in line]
            service = RunningService(process, ports[0]) if ports else None
        elif service.request("/readyz")[0] == 200:
            return service
    raise RuntimeError(f"the service did not become ready: see {log}")


class HealthProbe:
    """Asks /healthz every 20 ms while it is entered, from a process of its own: this one is busy with the attack."""

    def __init__(self, service: RunningService) -> None:
        self._service = service
        self.latencies_s: list[float] = []

    def __enter__(self) -> "HealthProbe":
        words = [sys.executable, "-c", _PROBE, HOST, str(self._service.port)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        output, _ = self._process.communicate("", timeout=60)  # its input ends, and so does it
        self.latencies_s = json.loads(output)

    def percentile_ms(self, share: float) -> float:
        """Return a percentile of the latencies."""
        ordered = sorted(self.latencies_s)
        return 1000 * ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


_PROBE = """
import http.client, json, select, sys, time
connection, latencies = http.client.HTTPConnection(sys.argv[1], int(sys.argv[2]), timeout=60), []
while not select.select([sys.stdin], [], [], 0.02)[0]:
    start = time.perf_counter()
    connection.request("GET", "/healthz")
    connection.getresponse().read()
    latencies.append(time.perf_counter() - start)
print(json.dumps(latencies))
"""
