"""A real service with its own process, workers and signals."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vramcast.collocation.client import Client, Estimate
from vramcast.models.released import RELEASED

ROOT = Path(__file__).parents[1]


def spec(features: int) -> dict[str, Any]:
    network = {"arch": "pyramid", "input_features": features, "output_features": 2, "depth": 3}
    return {"spec": {"family": "mlp", "network": network, "training": {"batch_size": 8}}}


class Running:
    """A service and its log."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.events: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.events.append(json.loads(line))

    def wait_for(self, event: str, seconds: float = 90) -> dict[str, Any]:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for item in list(self.events):
                if item["event"] == event:
                    return item
            assert self.process.poll() is None, self.events
            time.sleep(0.02)
        raise AssertionError(f"no {event} in {self.events}")


@contextmanager
def started(checkpoint: Path) -> Iterator[Running]:
    words = ["serve", "--port", "0", "--checkpoint", str(checkpoint)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "VRAMCAST_TOKEN": ""}
    process = subprocess.Popen(
        [sys.executable, "-m", "vramcast", *words], stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        yield Running(process)
    finally:
        process.kill()
        process.wait()


def test_a_service_starts_answers_reloads_and_stops(tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(RELEASED / "universal", tmp_path / "mine"))
    with started(checkpoint) as running:
        port = running.wait_for("serving")["port"]
        client = Client(f"http://127.0.0.1:{port}", timeout_seconds=90)
        response = client.classify(spec(64))  # waits for the worker
        assert (response.from_fallback, response.verdict) == (False, "fits")
        assert client.is_ready()
        _reloads(running, client, checkpoint)
        silent = socket.create_connection(("127.0.0.1", port))
        silent.sendall(b"POST /v1/classify HTTP/1.1\r\nHost: x\r\n")  # and never more
        _stops(running, client, port)
        silent.close()


def _reloads(running: Running, client: Client, checkpoint: Path) -> None:
    """Check that SIGHUP reads the checkpoint again, and that a damaged one changes nothing."""
    running.process.send_signal(signal.SIGHUP)
    running.wait_for("reloaded")
    (checkpoint / "weights.safetensors").write_bytes(b"")
    running.process.send_signal(signal.SIGHUP)
    assert "sound estimator" in running.wait_for("reload failed")["reason"]
    assert client.classify({**spec(64), "bucket_mib": 512}).verdict == "fits"


def _stops(running: Running, client: Client, port: int) -> None:
    """Check SIGTERM under load: requests under way are answered, and the exit code is 0."""
    answers: list[Estimate] = []
    askers = [threading.Thread(target=lambda i=i: answers.append(client.classify(spec(100 + i)))) for i in range(6)]
    for asker in askers:
        asker.start()
    until = time.monotonic() + 20
    while _in_flight(port) < len(askers) and not answers and time.monotonic() < until:
        time.sleep(0.005)
    running.process.send_signal(signal.SIGTERM)
    for asker in askers:
        asker.join(60)
    assert [item.from_fallback for item in answers] == [False] * 6
    assert running.process.wait(60) == 0
    assert [item["signal"] for item in running.events if item["event"] == "stopping"] == ["SIGTERM"]


def _in_flight(port: int) -> int:
    """Return the number of requests in flight, without the one for this number."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    return int(float(next(line for line in lines if line.startswith("vramcast_requests_in_flight ")).split()[1])) - 1
