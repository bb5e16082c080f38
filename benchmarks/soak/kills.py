"""Kills of a service under load: no acknowledged observation may be lost."""

import http.client
import json
import random
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.soak.running_service import RunningService, running_service

_THREADS = 4


def killed(directory: Path, number: int, acknowledged: dict[int, float]) -> list[str]:
    """Start a service, check what was acknowledged before, send observations and kill it. Return what was lost."""
    draw = random.Random(number)
    with running_service(directory / "kills.log", "--history", str(directory / "history.jsonl")) as service:
        faults = _lost(service, acknowledged, draw)
        threads = [threading.Thread(target=_observe, args=(service, acknowledged)) for _ in range(_THREADS)]
        for thread in threads:
            thread.start()
        time.sleep(draw.uniform(0.2, 2.0))
        service.process.kill()
        for thread in threads:
            thread.join()
    return faults


def _observe(service: RunningService, acknowledged: dict[int, float]) -> None:
    """Send observations until the service is gone."""
    while True:
        batch, peak_mib = random.randrange(1, 2**24), round(random.uniform(1000, 15_000), 3)
        try:
            status, _ = service.post("/v1/observations", {"job": _job(batch), "device": "t4", "peak_mib": peak_mib})
        except (OSError, http.client.HTTPException, ValueError):
            return
        if status == 200:
            acknowledged[batch] = max(peak_mib, acknowledged.get(batch, 0.0))


def _lost(service: RunningService, acknowledged: dict[int, float], draw: random.Random) -> list[str]:
    """Look up a sample of the observations. /v1/slurm answers from the history, without a forecast."""
    sample = draw.sample(sorted(acknowledged), min(300, len(acknowledged)))
    faults = []
    for batch in sample:
        status, reply = service.request("/v1/slurm", _slurm_text(batch), "text/plain")
        lines = dict(line.split("=", 1) for line in reply.decode().splitlines() if "=" in line)
        if status != 200 or lines.get("basis") != "observed" or float(lines["need_mib"]) < acknowledged[batch]:
            faults.append(f"lost the observation of batch {batch}: {status} {lines}")
    return faults


def _job(batch: int) -> dict[str, Any]:
    network = {"arch": "uniform", "input_features": 8, "output_features": 2, "depth": 1}
    return {"spec": {"family": "mlp", "network": network, "training": {"batch_size": batch}}}


def _slurm_text(batch: int) -> bytes:
    return json.dumps({**_job(batch), "device": "t4"}).encode()
