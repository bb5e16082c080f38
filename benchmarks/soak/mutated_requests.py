"""Requests that are right, changed at random: values, keys, types, numbers and bytes."""

import copy
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

MLP = {
    "family": "mlp",
    "network": {"arch": "pyramid", "input_features": 64, "output_features": 2, "depth": 2},
    "training": {"batch_size": 8, "optimizer": "SGD(momentum=0.9)", "accumulate": 2},
}
TEMPLATE = {
    "family": "template",
    "network": {"template": "resnet", "stages": [[16, 1], [32, 1]], "input_size": 32, "num_classes": 10},
    "training": {"batch_size": 4},
}
TRAINING = {"batch_size": 4, "optimizer": "Adafactor", "dtype": "bf16", "dry_run_batch_size": 2}
TABLE = {
    "layers": [{"kind": "Linear", "output_shape": [10], "activations": 10, "parameters": 110, "name": "first"}],
    "trainable_shapes": [[10, 10], [10]],
    "input_elements": 10,
}
SIMULATED = {"fits": True, "requested_bytes": 9, "allocated_bytes": 9, "reserved_bytes": 2**21, "workspace_bytes": 0}
NAME = "gpumemnet:input:784_output:10_depth:3_arch:pyramid_batch:64.out"
JOBS = (
    {"spec": MLP, "device": "t4", "risk": 0.02, "distribution": True},
    {"spec": TEMPLATE},
    {"name": NAME, "bucket_mib": 512},
    {"table": TABLE, "training": TRAINING},
    {"features": {"table": TABLE, "training": TRAINING, "simulated": SIMULATED, "family": "mlp"}},
)
GPU = {"id": "0", "free_mib": 4000.0, "total_mib": 40960, "device": "t4", "jobs": 1}
HAMI = [{"id": "GPU-0", "devmem": 40960, "type": "NVIDIA A100-SXM4-40GB", "health": True}]

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 10**400, -(10**400), 0.0, -0.0, 1e-320, 1e308, "", "x", "\u0000",
    "é" * 50, "9" * 400, "SGD(lr={[]})", "Adam(" * 20, "NaN", "Infinity", [], {}, [[]], [[0, 0]], {"a": {}},
    "../../etc/passwd",
)  # fmt: skip


def _node(draw: random.Random, name: str) -> dict[str, Any]:
    annotations = {"vramcast/gpus": json.dumps([GPU])} if draw.random() < 0.5 else {
        "hami.io/node-nvidia-register": json.dumps(HAMI)
    }  # fmt: skip
    return {"metadata": {"name": name, "annotations": annotations}}


def _pod(draw: random.Random) -> dict[str, Any]:
    job = changed(draw, draw.choice(JOBS)) if draw.random() < 0.5 else draw.choice(JOBS)
    annotations = {"vramcast/job": _text(job), "vramcast/risk": draw.choice(["0.05", "2", "x"])}
    if draw.random() < 0.2:
        annotations["vramcast/need-mib"] = draw.choice(["3000", "9" * 400, "-1", "٣"])
    containers = [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]
    return {"metadata": {"name": "p", "annotations": annotations}, "spec": {"containers": containers}}


def _classify(draw: random.Random) -> tuple[str, Any]:
    jobs = [draw.choice(JOBS) for _ in range(draw.randint(1, 3))]
    return "/v1/classify", {"jobs": jobs} if draw.random() < 0.3 else jobs[0]


def _observations(draw: random.Random) -> tuple[str, Any]:
    items = [{"job": draw.choice(JOBS), "peak_mib": 1000.5, "device": "t4"} for _ in range(2)]
    if draw.random() < 0.2:
        items[0] = {"job": draw.choice(JOBS), "forget": True}
    return "/v1/observations", {"observations": items} if draw.random() < 0.4 else items[0]


def _placements(draw: random.Random) -> tuple[str, Any]:
    gpus = [{**GPU, "id": str(index)} for index in range(draw.randint(1, 4))]
    return "/v1/placements", {"job": draw.choice(JOBS), "gpus": gpus, "policy": "best-fit", "margin_mib": 10.0}


def _slurm(draw: random.Random) -> tuple[str, Any]:
    return "/v1/slurm", draw.choice((*JOBS, MLP, NAME))


def _kubernetes(draw: random.Random) -> tuple[str, Any]:
    nodes = [_node(draw, name) for name in ("a", "b")]
    return draw.choice((
        ("/k8s/filter", {"Pod": _pod(draw), "Nodes": {"items": nodes}, "NodeNames": None}),
        ("/k8s/filter", {"Pod": _pod(draw), "NodeNames": ["a", "b"]}),
        ("/k8s/prioritize", {"Pod": _pod(draw), "Nodes": {"items": nodes}}),
        ("/k8s/nodes", {"items": nodes}),
        ("/k8s/mutate", {"request": {"uid": "u", "object": _pod(draw)}}),
    ))  # fmt: skip


def _volcano(draw: random.Random) -> tuple[str, Any]:
    task, nodes = {"Pod": _pod(draw)}, [{"Node": _node(draw, name)} for name in ("a", "b")]
    return draw.choice((
        ("/volcano/predicate", {"task": task, "node": nodes[0]}),
        ("/volcano/prioritize", {"task": task, "nodes": nodes}),
    ))  # fmt: skip


FAMILIES: Mapping[str, Callable[[random.Random], tuple[str, Any]]] = {
    "classify": _classify,
    "observations": _observations,
    "placements": _placements,
    "slurm": _slurm,
    "kubernetes": _kubernetes,
    "volcano": _volcano,
}


def mutated(family: str, seed: int) -> tuple[str, bytes]:
    """Return a path and a body. The same seed gives the same request."""
    draw = random.Random(f"{family} {seed}")
    path, value = FAMILIES[family](draw)
    for _ in range(draw.choice([0, 1, 1, 1, 2, 3])):
        value = changed(draw, value)
    body = _text(value).encode(errors="surrogatepass")
    return path, _damaged(draw, body) if draw.random() < 0.15 else body


def changed(draw: random.Random, value: Any) -> Any:
    """Return a value with one part replaced, removed, doubled or added."""
    value = copy.deepcopy(value)
    places = list(_places(value))
    if not places:
        return draw.choice(VALUES)
    container, key = draw.choice(places)
    match draw.randrange(6):
        case 0:
            del container[key]
        case 1 if isinstance(container, dict):
            container[draw.choice(["", "x", "spec", "jobs", "device", "\u0000"])] = draw.choice(VALUES)
        case 2 if isinstance(container, list):
            container.extend(copy.deepcopy(container[key]) for _ in range(draw.choice([1, 10, 200])))
        case 3 if isinstance(container[key], int | float):
            container[key] = container[key] * draw.choice([-1, 0, 2, 1000, 2**20])
        case 4 if isinstance(container[key], str) and container[key]:
            cut = draw.randrange(len(container[key]))
            container[key] = (
                container[key][:cut] + draw.choice(["", "0", "9" * 200, "}", "\\"]) + container[key][cut + 1 :]
            )
        case _:
            container[key] = draw.choice(VALUES)
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return each container in a value with each of its keys."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [(value, key) for key in keys] + [place for key in keys for place in _places(value[key])]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _damaged(draw: random.Random, body: bytes) -> bytes:
    cut = draw.randrange(len(body) + 1)
    match draw.randrange(4):
        case 0:
            return body[:cut]
        case 1:
            return body[:cut] + bytes([draw.randrange(256)]) + body[cut + 1 :]
        case 2:
            return body[:cut] + draw.choice([b"[" * 1000, b"NaN", b'"', b"\xff", b"9" * 5000]) + body[cut:]
    return body + body
