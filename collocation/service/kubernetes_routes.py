"""The paths that Kubernetes and Volcano call. They fail open: a pod without a figure is scheduled as usual."""

import logging
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response

from vramcast.collocation.adapters import admission, kubernetes, volcano
from vramcast.collocation.adapters.kubernetes import JOB, NEED, RISK, Known
from vramcast.collocation.placement import GpuState, Need
from vramcast.collocation.service.engine import Engine
from vramcast.collocation.service.estimating import Estimated, Seen
from vramcast.collocation.service.http import PROBLEMS, StrictRoute, engine_of, reply
from vramcast.collocation.service.logs import event
from vramcast.collocation.service.node_registry import NodeRegistry
from vramcast.collocation.service.slurm import job_from_text
from vramcast.dataset_builder.devices import device_names, device_of_gpu
from vramcast.errors import UserError

Anything = Annotated[dict[str, Any], Body()]
POLICY = "best-fit"

router = APIRouter(route_class=StrictRoute, responses=PROBLEMS)


def _book(request: Request) -> NodeRegistry:
    if not hasattr(request.app.state, "nodes"):
        request.app.state.nodes = NodeRegistry()
    book: NodeRegistry = request.app.state.nodes
    return book


profile_for = lru_cache(maxsize=256)(device_of_gpu)


async def need_of(engine: Engine, pod: Mapping[str, Any], gpus: Sequence[GpuState]) -> Need | None:
    """What the pod needs on each kind of card: as it says itself, or as its job is answered; None without either."""
    stated = _stated(pod)
    if stated is not None:
        return stated
    found = await _set_aside(engine, pod, {gpu.device for gpu in gpus} or {None})
    return {device: item.set_aside_mib for device, item in found.items()} if found else None


def _stated(pod: Mapping[str, Any]) -> float | None:
    """What the pod says itself that it needs."""
    text = kubernetes.annotations_of(pod).get(NEED, "")
    return float(text[:12]) if text.isdecimal() else None


async def _set_aside(
    engine: Engine, pod: Mapping[str, Any], devices: Collection[str | None]
) -> Mapping[str | None, Seen] | Mapping[str | None, Estimated]:
    """The pod's job on each device; nothing where it names none."""
    notes = kubernetes.annotations_of(pod)
    if JOB not in notes:
        return {}
    job = job_from_text(notes[JOB])
    if RISK in notes and job.risk is None:
        job.risk = _risk(notes[RISK])
    return await engine.set_aside(job, devices)


def _risk(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < 0.5:
        raise UserError(f"expected {RISK} between 0 and 0.5, found {text[:20]!r}: change it")
    return found


def _known(
    request: Request, nodes: Sequence[Mapping[str, Any]] | None, names: Sequence[str]
) -> dict[str, list[GpuState] | None]:
    """The GPUs of each node: as it says itself, else as it was told before."""
    book = _book(request)
    found: dict[str, list[GpuState] | None] = {}
    for node in nodes or ():
        gpus = kubernetes.gpus_of(node, profile_for)
        if gpus is not None:
            book.note(kubernetes.name_of(node), [_with_profile(gpu) for gpu in gpus])
    for name in names:
        found[name] = book.get(name)
    return found


def _with_profile(gpu: GpuState) -> GpuState:
    """A device that has no profile is answered for as the default one."""
    known = gpu.device is None or gpu.device in device_names()
    return gpu if known else GpuState(gpu.id, gpu.free_mib, gpu.total_mib, None, gpu.node, gpu.jobs)


async def _need_or_none(request: Request, pod: Mapping[str, Any], known: Known) -> Need | None:
    try:
        return await need_of(engine_of(request), pod, [gpu for gpus in known.values() for gpu in gpus or ()])
    except UserError as error:
        event("pod without a figure", logging.WARNING, pod=kubernetes.name_of(pod), reason=str(error))
        return None


@router.post("/k8s/filter")
async def filter_nodes(request: Request, body: Anything) -> Response:
    """ExtenderArgs to ExtenderFilterResult."""
    try:
        args = kubernetes.read_args(body)
    except UserError as error:
        return reply(kubernetes.filter_failed(str(error)))
    known = _known(request, args.nodes, args.names)
    need = await _need_or_none(request, args.pod, known)
    if need is None:
        return reply(kubernetes.filter_reply(args, kubernetes.Verdict(args.names, {}, {})))
    return reply(kubernetes.filter_reply(args, kubernetes.judge(need, kubernetes.gpu_count(args.pod), known)))


@router.post("/k8s/prioritize")
async def prioritize(request: Request, body: Anything) -> Response:
    """ExtenderArgs to HostPriorityList."""
    try:
        args = kubernetes.read_args(body)
    except UserError as error:
        event("extender arguments refused", logging.WARNING, reason=str(error))
        return reply([])
    known = _known(request, args.nodes, args.names)
    need = await _need_or_none(request, args.pod, known)
    return reply(kubernetes.prioritize_reply(need, args.names, known, POLICY))


@router.post("/k8s/nodes")
async def tell_nodes(request: Request, body: Anything) -> Response:
    """A NodeList, whose annotations say what is free: for extenders that are only told names."""
    items = body.get("items")
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
        raise UserError("expected a NodeList with items, found none: send what kubectl get nodes -o json prints")
    found = _known(request, items, [kubernetes.name_of(item) for item in items])
    return reply({"known": sum(gpus is not None for gpus in found.values())})


@router.post("/k8s/mutate")
async def mutate(request: Request, body: Anything) -> Response:
    """AdmissionReview in and out: the pod's limits or annotations say what its job will take."""
    asked = admission.read_review(body)
    engine = engine_of(request)
    try:
        patch = await _patch(engine, asked.pod)
    except UserError as error:
        return reply(admission.review_reply(asked.uid, [], f"vramcast: {error}"))
    return reply(admission.review_reply(asked.uid, patch))


async def _patch(engine: Engine, pod: Mapping[str, Any]) -> list[dict[str, Any]]:
    stated = _stated(pod)
    if stated is not None:
        return admission.patch_of(pod, stated, engine.settings.resource)
    found = await _set_aside(engine, pod, {None})
    if not found:
        return []
    return admission.patch_of(pod, found[None].set_aside_mib, engine.settings.resource, found[None].basis)


@router.post("/volcano/predicate")
async def predicate(request: Request, body: Anything) -> Response:
    """A task and a node to whether it may go there."""
    pod, node = volcano.read_task(body), volcano.read_node(body.get("node"))
    known = _known(request, [node], [kubernetes.name_of(node)])
    need = await _need_or_none(request, pod, known)
    if need is None:
        return reply(volcano.predicate_reply(None))
    verdict = kubernetes.judge(need, kubernetes.gpu_count(pod), known)
    return reply(volcano.predicate_reply(next(iter(verdict.reasons.values()), None)))


@router.post("/volcano/prioritize")
async def volcano_prioritize(request: Request, body: Anything) -> Response:
    """A task and nodes to a score for each."""
    pod, nodes = volcano.read_task(body), volcano.read_nodes(body)
    names = [kubernetes.name_of(node) for node in nodes]
    known = _known(request, nodes, names)
    need = await _need_or_none(request, pod, known)
    scores = kubernetes.prioritize_reply(need, names, known, POLICY)
    return reply(volcano.prioritize_reply({item["Host"]: float(item["Score"]) for item in scores}))
