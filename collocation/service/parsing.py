"""Reads the bodies of requests: JSON or text in, checked values out. Needs neither torch nor HTTP.

Small bodies are read in the event loop. Larger ones are read in a worker process, because parsing holds the GIL.
"""

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from vramcast.collocation.adapters import admission, kubernetes, volcano
from vramcast.collocation.adapters.job_text import job_of_text
from vramcast.collocation.adapters.kubernetes import JOB, NEED, RISK, GpusByNode
from vramcast.collocation.placement import GpuState
from vramcast.collocation.service.requests import (
    AdviceBody,
    AnyJobBody,
    ClassifyBody,
    JobBody,
    ObservationsBody,
    PlacementBody,
    SolveBody,
)
from vramcast.device.profiles import device_names, device_of_gpu
from vramcast.errors import UserError
from vramcast.jobs.filters import Rejected, check
from vramcast.jobs.network_files.description import NetworkDescription
from vramcast.jobs.network_files.reading import read_network_bytes
from vramcast.jobs.spec import Spec
from vramcast.jobs.targets import parse_shape
from vramcast.virtual_gpu.training.setup import TrainingSetup

_MOST_ERRORS = 100
"""A validation error with more errors is reported as a number: pydantic can only describe all of them."""
_LONGEST_NAME = 253
"""Of a node (kubernetes, apimachinery, validation.go: DNS1123SubdomainMaxLength)."""


_MOST_GPUS = 4096
"""In one request; further nodes count as unknown. A body of 1 MiB has room for about a hundred real nodes."""


class BadBodyError(UserError):
    """A body that cannot be read, with the status of the response and the place of the error."""

    def __init__(self, status: int, sentence: str, where: str | None = None) -> None:
        super().__init__(status, sentence, where)
        self.status = status
        self.where = where

    def __str__(self) -> str:
        """Return the sentence alone."""
        return str(self.args[1])


@dataclass(frozen=True)
class PodRequest:
    """What a pod asks for."""

    name: str
    gpus: int
    need_mib: float | None
    """The need that the pod states itself."""
    job: AnyJobBody | None
    uid: str = ""
    """The pod's UID, or its name."""
    problem: str | None = None
    """Why the job of the pod could not be read."""


@dataclass(frozen=True)
class ExtenderRequest:
    """A pod and the nodes that it could go to."""

    args: kubernetes.ExtenderArgs
    pod: PodRequest
    gpus: GpusByNode
    """GPUs of the nodes that state them."""


@dataclass(frozen=True)
class NodesRequest:
    """Nodes with their GPUs."""

    names: Sequence[str]
    gpus: GpusByNode


@dataclass(frozen=True)
class TaskRequest:
    """A task of Volcano and the nodes that it could go to."""

    pod: PodRequest
    names: Sequence[str]
    gpus: GpusByNode


@dataclass(frozen=True)
class ReviewPart:
    """A part of an object that is to be admitted, and the job that it states."""

    part: admission.Part
    pod: PodRequest


@dataclass(frozen=True)
class ReviewRequest:
    """An object that is to be admitted, and its parts with jobs."""

    review: admission.Admission
    parts: Sequence[ReviewPart]


_JOB: TypeAdapter[AnyJobBody] = TypeAdapter(JobBody)


def parse_body(path: str, body: bytes) -> Any:
    """Return the checked body of a request to a path. Raise `UserError` for a bad one."""
    return _PARSERS[path](body)


def job_of(text: str) -> AnyJobBody:
    """Return the job in an annotation, a comment or a script."""
    job: AnyJobBody = _validated(_JOB, job_of_text(text), "a job")
    return job


def read_file(file: str, encoding: str, inputs: tuple[str, ...], most_layers: int) -> NetworkDescription:
    """Return the network in a file without code. A configuration or a spec is refused: it would have to be built."""
    try:
        content = base64.b64decode(file, validate=True) if encoding == "base64" else file.encode()
    except (binascii.Error, ValueError) as error:  # ValueError: a text that is not ASCII, or half a character
        raise UserError(f"expected a file in {encoding}, found: {error}; encode it again") from error
    network = read_network_bytes(content, tuple(parse_shape(text)[0] for text in inputs))
    if not isinstance(network, NetworkDescription):
        raise UserError(
            "expected a file with the layers of a network, found a configuration: name the network as target, or send "
            "a spec as spec"
        )
    layers = len(network.table.layers)
    if layers > most_layers:
        raise UserError(f"expected at most {most_layers} layers, found {layers}: make the network smaller")
    return network


def check_layers(spec: Spec, most_layers: int, most_layer_passes: int) -> None:
    """Refuse a spec of a generated family that cannot be trained, or takes too long to simulate."""
    table = check(spec)
    check.cache_clear()  # a table of thousands of layers takes tens of MiB
    if isinstance(table, Rejected):
        raise UserError(f"expected a network that can be trained, found that {table.reason}: change it")
    check_work(spec.training, len(table.layers), most_layers, most_layer_passes)


def check_work(training: TrainingSetup, layers: int, most_layers: int, most_layer_passes: int) -> None:
    """Refuse a network with too many layers, or a training with too many passes through them."""
    if layers > most_layers:
        raise UserError(f"expected at most {most_layers} layers, found {layers}: make the network smaller")
    passes = training.accumulate + (training.dry_run_passes if training.dry_run_batch_size else 0)
    if layers * passes > most_layer_passes:
        raise UserError(
            f"expected at most {most_layer_passes} layers times accumulated passes, found {layers} times {passes}: "
            "lower accumulate, which changes little once it is above 2"
        )


def _json(body: bytes) -> Any:
    """Parse strict JSON: no NaN, no infinity, at most 200 levels of nesting (a limit of jiter)."""
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise BadBodyError(400, f"expected JSON, found {error}: fix it") from error


def _object(body: bytes) -> dict[str, Any]:
    value = _json(body)
    if not isinstance(value, dict):
        raise BadBodyError(422, f"expected a JSON object, found {type(value).__name__}: check the path", "body")
    return value


def _validated(adapter: TypeAdapter[Any], value: Any, what: str = "a request", root: Sequence[str] = ()) -> Any:
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        count = error.error_count()
        if count > _MOST_ERRORS:
            raise BadBodyError(
                422, f"expected {what} as described in /openapi.json, found {count} errors: fix them"
            ) from None
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(item) for item in (*root, *first["loc"]))[:200]
        more = f" (and {count - 1} more)" if count > 1 else ""
        raise BadBodyError(
            422, f"expected {what} as described in /openapi.json, found at {where}: {first['msg']}{more}", where
        ) from None


def _typed(adapter: TypeAdapter[Any], body: bytes) -> Any:
    return _validated(adapter, _json(body), root=("body",))


def _slurm(body: bytes) -> AnyJobBody:
    try:
        return job_of(body.decode())
    except UnicodeDecodeError as error:
        raise UserError("expected a job as UTF-8, found other bytes: fix it") from error


def _extender(body: bytes) -> ExtenderRequest:
    args = kubernetes.read_args(_object(body))
    return ExtenderRequest(args, _pod(args.pod), _gpus(args.nodes or ()))


def _nodes(body: bytes) -> NodesRequest:
    items = _object(body).get("items")
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
        raise UserError("expected a NodeList with items, found none: send the output of kubectl get nodes -o json")
    return NodesRequest([kubernetes.name_of(item) for item in items], _gpus(items))


def _review(body: bytes) -> ReviewRequest:
    review = admission.read_review(_object(body))
    return ReviewRequest(review, [ReviewPart(part, _pod(part.pod)) for part in admission.parts_of(review)])


def _volcano_task(body: bytes) -> TaskRequest:
    return _task(value := _object(body), [volcano.read_node(value.get("node"))])


def _volcano_nodes(body: bytes) -> TaskRequest:
    return _task(value := _object(body), volcano.read_nodes(value))


def _task(value: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> TaskRequest:
    pod = volcano.read_task(value)
    return TaskRequest(_pod(pod), [kubernetes.name_of(node) for node in nodes], _gpus(nodes))


def _pod(pod: Mapping[str, Any]) -> PodRequest:
    """Read a pod. A job that cannot be read is no error: the pod is scheduled without a figure."""
    annotations = kubernetes.annotations_of(pod)
    name, gpus, stated = kubernetes.name_of(pod), kubernetes.gpu_count(pod), annotations.get(NEED, "")
    uid = kubernetes.uid_of(pod)
    need_mib = float(stated[:12]) if stated.isdecimal() else None
    if need_mib is not None or JOB not in annotations:
        return PodRequest(name, gpus, need_mib, None, uid)
    try:
        job = job_of(annotations[JOB])
        if RISK in annotations and job.risk is None:
            job.risk = _risk(annotations[RISK])
    except Exception as error:  # a pod is never held up
        sentence = (
            str(error) if isinstance(error, UserError) else f"expected a job, found {type(error).__name__}: fix it"
        )
        return PodRequest(name, gpus, None, None, uid, sentence)
    return PodRequest(name, gpus, None, job, uid)


def _risk(text: str) -> float:
    try:
        risk = float(text)
    except ValueError:
        risk = 0.0
    if not 0 < risk < 0.5:
        raise UserError(f"expected {RISK} between 0 and 0.5, found {text[:20]!r}: change it")
    return risk


def _gpus(nodes: Sequence[Mapping[str, Any]]) -> GpusByNode:
    """Return the GPUs of the nodes that state them. A device without a profile counts as the default device."""
    stated: dict[str, list[GpuState] | None] = {}
    room = _MOST_GPUS
    for node in nodes:
        name, gpus = kubernetes.name_of(node), kubernetes.gpus_of(node, _device)
        if gpus is not None and len(name) <= _LONGEST_NAME and len(gpus) <= room:
            stated[name] = gpus
            room -= len(gpus)
    return stated


@lru_cache(maxsize=256)  # names of at most 100 characters, see kubernetes.gpus_of
def _device(name: str) -> str | None:
    """Return the profile that a node means by the name of a profile or of a GPU."""
    return name if name in device_names() else device_of_gpu(name)


_PARSERS: Mapping[str, Callable[[bytes], Any]] = {
    "/v1/classify": partial(_typed, TypeAdapter(ClassifyBody)),
    "/v1/advice": partial(_typed, TypeAdapter(AdviceBody)),
    "/v1/timeline": partial(_typed, TypeAdapter(AdviceBody)),
    "/v1/solve": partial(_typed, TypeAdapter(SolveBody)),
    "/v1/observations": partial(_typed, TypeAdapter(ObservationsBody)),
    "/v1/placements": partial(_typed, TypeAdapter(PlacementBody)),
    "/v1/slurm": _slurm,
    "/k8s/filter": _extender,
    "/k8s/prioritize": _extender,
    "/k8s/nodes": _nodes,
    "/k8s/mutate": _review,
    "/volcano/predicate": _volcano_task,
    "/volcano/prioritize": _volcano_nodes,
}
