"""Attacks on the memory and the time of a service, each with the bound that must hold."""

import json
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.soak.mutated_requests import MLP
from benchmarks.soak.running_service import HOST, HealthProbe, RunningService

MOST_GROWTH_MIB = 100
"""The limit of one attack. All caches of the service together have a limit of 192 MiB."""
MOST_HEALTH_MS = 100.0

Figures = dict[str, float]


def nodes(service: RunningService, scale: float) -> Figures:
    """Send NodeLists with thousands of GPUs per node, and with many nodes."""
    gpu = {"id": "0", "free_mib": 1, "total_mib": 2}
    for index in range(max(20, int(600 * scale))):
        many = [{**gpu, "id": str(item)} for item in range(15_000 if index % 2 else 128)]
        items = [_node(f"n{index}-{item}", many) for item in range(1 if index % 2 else 120)]
        _accepted(service.post("/k8s/nodes", {"items": items})[0])
    return {}


def refused_observations(service: RunningService, scale: float) -> Figures:
    """Report peaks of deep networks, which are refused."""
    network = {
        "vocabulary": 10, "sequence_length": 2, "embedding_size": 2, "heads": 1, "feedforward_size": 2, "num_classes": 2
    }  # fmt: skip
    deep = {"arch": "uniform", "input_features": 2, "output_features": 2}
    for index in range(max(10, int(300 * scale))):
        spec: dict[str, Any] = {**MLP, "network": {**deep, "depth": 2900 - index % 500}}
        if index % 2:
            spec = {
                "family": "transformer",
                "network": {**network, "layers": 2900 - index},
                "training": {"batch_size": 1},
            }
        _accepted(service.post("/v1/observations", {"job": {"spec": spec}, "peak_mib": 1000})[0])
    return {}


def abandoned_reviews(service: RunningService, scale: float) -> Figures:
    """Send five reviews of slow networks and leave; then a new network must be answered soon."""
    for index in range(5):
        training = {"batch_size": 8, "accumulate": 1024}
        for depth, more in ((700 + index, training), (1100 + index, {"batch_size": 8})):
            spec = {**MLP, "network": {**MLP["network"], "depth": depth}, "training": more}
            annotations = {"vramcast/job": json.dumps(spec)}
            review = {"request": {"uid": "u", "object": {"metadata": {"name": "p", "annotations": annotations}}}}
            _send_and_leave(service, "/k8s/mutate", json.dumps(review).encode())
    start = time.perf_counter()
    _accepted(
        service.post("/v1/classify", {"spec": {**MLP, "training": {"batch_size": int(time.time()) % 10_000 + 1}}})[0]
    )
    return {"seconds_to_answer_a_new_network": time.perf_counter() - start}


def invalid_bodies(service: RunningService, scale: float) -> Figures:
    """Send ten bodies of 1 MiB with tens of thousands of validation errors at once."""
    training = {"batch_size": 1, **{f"key{index}": 1 for index in range(70_000)}}
    body = json.dumps({"spec": {**MLP, "training": training}}).encode()
    _at_once(service, "/v1/classify", [body] * 10, max(1, int(50 * scale)))
    return {}


def long_annotations(service: RunningService, scale: float) -> Figures:
    """Send 20 pods with annotations of 198 kB to the extender at once."""
    annotation = json.dumps({"spec": {**MLP, "network": {f"key{index}": 1 for index in range(14_000)}}})
    pod = {"metadata": {"name": "p", "annotations": {"vramcast/job": annotation[:198_000]}}}
    valid = {"metadata": {"name": "p", "annotations": {"vramcast/job": annotation}}}
    bodies = [json.dumps({"Pod": item, "NodeNames": ["a"]}).encode() for item in (pod, valid)]
    _at_once(service, "/k8s/filter", bodies * 10, max(1, int(10 * scale)))
    return {}


def large_tables(service: RunningService, scale: float) -> Figures:
    """Send 32 valid tables of 3,000 layers at once."""
    bodies = [json.dumps({**_table(3000), "bucket_mib": 64 + index}).encode() for index in range(32)]
    _at_once(service, "/v1/classify", bodies, max(1, int(2 * scale)))
    return {}


def slow_bodies(service: RunningService, scale: float) -> Figures:
    """Open 600 connections that send a body slowly; others must be answered."""
    head = b"POST /v1/classify HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n "
    connections = []
    try:
        for _ in range(600):
            connections.append(socket.create_connection((HOST, service.port), timeout=30))
            connections[-1].sendall(head)
        statuses = [service.post("/v1/classify", {"spec": MLP, "bucket_mib": 64 + index})[0] for index in range(20)]
        if set(statuses) != {200}:
            raise AssertionError(f"answered {statuses} beside slow bodies")
    finally:
        for connection in connections:
            connection.close()
    return {}


ATTACKS: Mapping[str, Callable[[RunningService, float], Figures]] = {
    "nodes with many GPUs": nodes,
    "refused observations": refused_observations,
    "abandoned reviews": abandoned_reviews,
    "invalid bodies of 1 MiB": invalid_bodies,
    "annotations of 198 kB": long_annotations,
    "tables of 3,000 layers": large_tables,
    "600 slow bodies": slow_bodies,
}


def attacked(service: RunningService, name: str, scale: float) -> tuple[Figures, list[str]]:
    """Run an attack. Return its figures, and what did not hold."""
    before_mib = service.memory_mib()
    with HealthProbe(service) as probe:
        time.sleep(1)
        figures = ATTACKS[name](service, scale)
        time.sleep(1)
    figures |= {
        "healthz_p50_ms": probe.percentile_ms(0.5),
        "healthz_p99_ms": probe.percentile_ms(0.99),
        "memory_mib": service.memory_mib(),
        "growth_mib": service.memory_mib() - before_mib,
    }
    faults = []
    if figures["growth_mib"] > MOST_GROWTH_MIB:
        faults.append(f"{name}: memory grew by {figures['growth_mib']:.0f} MiB")
    if figures["healthz_p99_ms"] > MOST_HEALTH_MS:
        faults.append(f"{name}: /healthz took {figures['healthz_p99_ms']:.0f} ms at the 99th percentile")
    return figures, faults


def _node(name: str, gpus: list[Any]) -> dict[str, Any]:
    return {"metadata": {"name": name, "annotations": {"vramcast/gpus": json.dumps(gpus)}}}


def _table(layers: int) -> dict[str, Any]:
    layer = {"kind": "Linear", "output_shape": [1024], "activations": 1024, "parameters": 1_049_600}
    table = {"layers": [layer] * layers, "trainable_shapes": [[1024, 1024], [1024]] * layers, "input_elements": 1024}
    return {"table": table, "training": {"batch_size": 8}}


def _at_once(service: RunningService, path: str, bodies: list[bytes], times: int) -> None:
    with ThreadPoolExecutor(len(bodies)) as threads:
        for _ in range(times):
            for status, _ in threads.map(lambda body: service.request(path, body, seconds=600), bodies):
                _accepted(status)


def _accepted(status: int) -> None:
    if status >= 500 and status not in (503, 507):
        raise AssertionError(f"answered {status}")


def _send_and_leave(service: RunningService, path: str, body: bytes) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((HOST, service.port), timeout=30) as connection:
        connection.sendall(head.encode() + body)
        time.sleep(0.2)
