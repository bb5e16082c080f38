"""The paths that Kubernetes and Volcano call. They fail open: a pod without a figure is scheduled as usual."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from vramcast.collocation.adapters import kubernetes, volcano
from vramcast.collocation.adapters.kubernetes import GpusByNode
from vramcast.collocation.placement import Need
from vramcast.collocation.service.engine import POLICY, Engine
from vramcast.collocation.service.http import PROBLEMS, ParsedRoute, engine_of, parsed_body, reply
from vramcast.collocation.service.loaded_checkpoint import EstimatedJob, ObservedJob
from vramcast.collocation.service.logs import event
from vramcast.collocation.service.node_registry import NodeRegistry
from vramcast.collocation.service.parsing import BadBodyError, PodRequest
from vramcast.errors import UserError

_ATTEMPTS = 5
"""Decisions about a pod while others take the room that it was about to get."""
_INLINE_GPUS = 1000
"""Decisions about more GPUs are made outside of the event loop."""

BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}}
router = APIRouter(route_class=ParsedRoute, responses=PROBLEMS)


def _registry(request: Request) -> NodeRegistry:
    if not hasattr(request.app.state, "nodes"):
        limit_bytes = engine_of(request).settings.limits.node_registry_bytes
        request.app.state.nodes = NodeRegistry(limit_bytes=limit_bytes)
    registry: NodeRegistry = request.app.state.nodes
    return registry


def _with_known_gpus(request: Request, names: Sequence[str], stated: GpusByNode) -> GpusByNode:
    """Return the GPUs of each node: as it states them, or as it stated them before."""
    registry = _registry(request)
    for name, gpus in stated.items():
        if gpus is not None:
            registry.put(name, gpus)
    return {name: stated.get(name) or registry.get(name) for name in names}


async def _need(engine: Engine, pod: PodRequest, gpus_by_node: GpusByNode) -> Need | None:
    """Return the need of a pod on each device, or None if there is no figure, whatever the reason."""
    if pod.need_mib is not None:
        return pod.need_mib
    try:
        reservations = await reservations_of(
            engine, pod, {gpu.device for gpus in gpus_by_node.values() for gpu in gpus or ()}
        )
    except Exception as error:
        event("pod without a figure", logging.WARNING, pod=pod.name, reason=reason_of(error))
        return None
    return {device: item.reservation_mib for device, item in reservations.items()} or None


async def reservations_of(
    engine: Engine, pod: PodRequest, devices: set[str | None]
) -> Mapping[str | None, ObservedJob] | Mapping[str | None, EstimatedJob]:
    """Return the reservation for a pod's job on each device; nothing if it has no job."""
    if pod.problem:
        raise UserError(pod.problem)
    return await engine.reserve(pod.job, devices or {None}) if pod.job else {}


def reason_of(error: Exception) -> str:
    """Return the sentence of an error for a user, or only the kind of an unexpected one."""
    return str(error) if isinstance(error, UserError) else type(error).__name__


async def _decided(engine: Engine, decide: Callable[[], Any], gpus_by_node: GpusByNode) -> Any:
    """Make a decision, outside of the event loop if there are many GPUs."""
    gpus = sum(len(item or ()) for item in gpus_by_node.values())
    return decide() if gpus <= _INLINE_GPUS else await engine.batcher.call(decide)


@router.post("/k8s/filter", openapi_extra=BODY)
async def filter_nodes(request: Request) -> Response:
    """Answer ExtenderArgs with an ExtenderFilterResult."""
    try:
        body = await parsed_body(request)
    except BadBodyError:
        raise
    except Exception as error:
        return reply(kubernetes.filter_failed(reason_of(error)))
    engine, pod = engine_of(request), body.pod
    stated = _with_known_gpus(request, body.args.names, body.gpus)
    need = await _need(engine, pod, stated)
    if need is None:
        return reply(kubernetes.filter_reply(body.args, kubernetes.Verdict(body.args.names, {}, {})))
    verdict = await _verdict(engine, pod, need, stated)
    if verdict.reasons and not verdict.fitting:
        node, reason = next(iter(verdict.reasons.items()))
        event("pod fits nowhere", pod=pod.name, nodes=len(verdict.reasons), node=node, reason=reason)
    return reply(kubernetes.filter_reply(body.args, verdict))


async def _verdict(engine: Engine, pod: PodRequest, need: Need, stated: GpusByNode) -> kubernetes.Verdict:
    """Return the nodes that fit. If there is one, the pod is approved for it: the scheduler then asks for no scores."""
    for _ in range(_ATTEMPTS):
        gpus_by_node = await engine.approvals.subtracted(pod.uid, stated)
        verdict: kubernetes.Verdict = await _decided(
            engine, partial(kubernetes.judge, need, pod.gpus, gpus_by_node), gpus_by_node
        )
        if len(verdict.fitting) != 1 or await _approved(engine, pod, need, next(iter(verdict.fitting)), stated):
            break
    return verdict


async def _approved(engine: Engine, pod: PodRequest, need: Need, node: str, stated: GpusByNode) -> bool:
    """Approve a pod for a node. Return False if another pod has just taken its room."""
    gpus = stated.get(node)
    return not gpus or await engine.approvals.approve(pod.uid, need, pod.gpus, node, gpus)


@router.post("/k8s/prioritize", openapi_extra=BODY)
async def prioritize(request: Request) -> Response:
    """Answer ExtenderArgs with a HostPriorityList."""
    try:
        body = await parsed_body(request)
    except BadBodyError:
        raise
    except Exception as error:
        event("extender arguments refused", logging.WARNING, reason=reason_of(error))
        return reply([])
    engine, pod = engine_of(request), body.pod
    stated = _with_known_gpus(request, body.args.names, body.gpus)
    need = await _need(engine, pod, stated)
    for _ in range(_ATTEMPTS):
        gpus_by_node = await engine.approvals.subtracted(pod.uid, stated)
        scores = await _scores(engine, need, pod.gpus, body.args.names, gpus_by_node)
        best = max(scores, key=lambda item: int(item["Score"]), default=None)
        if need is None or not best or await _approved(engine, pod, need, best["Host"], stated) or not best["Score"]:
            break
    return reply(scores)


async def _scores(
    engine: Engine, need: Need | None, count: int, names: Sequence[str], gpus_by_node: GpusByNode
) -> list[dict[str, Any]]:
    scores: list[dict[str, Any]] = await _decided(
        engine, lambda: kubernetes.prioritize_reply(need, count, names, gpus_by_node, POLICY), gpus_by_node
    )
    return scores


@router.post("/k8s/nodes", openapi_extra=BODY)
async def put_nodes(request: Request) -> Response:
    """Keep the GPUs of a NodeList, for an extender that only receives names."""
    body = await parsed_body(request)
    gpus_by_node = _with_known_gpus(request, body.names, body.gpus)
    return reply({"known": sum(gpus is not None for gpus in gpus_by_node.values())})


@router.post("/volcano/predicate", openapi_extra=BODY)
async def predicate(request: Request) -> Response:
    """Answer whether a task may go to a node."""
    body = await parsed_body(request)
    gpus_by_node = _with_known_gpus(request, body.names, body.gpus)
    need = await _need(engine_of(request), body.pod, gpus_by_node)
    if need is None:
        return reply(volcano.predicate_reply(None))
    verdict = kubernetes.judge(need, body.pod.gpus, gpus_by_node)
    return reply(volcano.predicate_reply(next(iter(verdict.reasons.values()), None)))


@router.post("/volcano/prioritize", openapi_extra=BODY)
async def volcano_prioritize(request: Request) -> Response:
    """Answer a task and nodes with a score for each node."""
    body = await parsed_body(request)
    gpus_by_node = _with_known_gpus(request, body.names, body.gpus)
    need = await _need(engine_of(request), body.pod, gpus_by_node)
    scores = await _scores(engine_of(request), need, body.pod.gpus, body.names, gpus_by_node)
    return reply(volcano.prioritize_reply({item["Host"]: float(item["Score"]) for item in scores}))
