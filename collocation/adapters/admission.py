"""The mutating admission webhook, which writes the need of a job into its pod (admission.k8s.io/v1)."""

import base64
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vramcast.collocation.adapters.kubernetes import BASIS, NEED, annotations_of, limits_of
from vramcast.errors import UserError, check_choice

_GIB_MIB = 1024
CONTAINER = "kubectl.kubernetes.io/default-container"
"""The annotation by which a pod names its main container."""


@dataclass(frozen=True)
class Resource:
    """The resource that a scheduler reads the need from."""

    key: str
    unit_mib: int = 1
    count_key: str | None = None
    """A resource that must be present for the amount to count."""
    annotation: bool = False
    """True for an annotation of the pod instead of a limit of its container."""
    refused_beside: str | None = None
    """A limit that the scheduler refuses beside the amount; the pod then keeps its own request."""
    scheduler: str | None = None
    """The `schedulerName` without which the amount is not read."""
    queue_label: str | None = None
    """A label of the pod that the scheduler needs."""
    container_key: str | None = None
    """The annotation that names the container of the amount, in a pod with several."""


RESOURCES: Mapping[str, Resource] = {
    # HAMi, docs/userguide/nvidia-device: MiB for each of the GPUs asked for; without it a job gets the whole GPU.
    "hami": Resource("nvidia.com/gpumem", count_key="nvidia.com/gpu"),
    # volcano-vgpu-device-plugin, README: MiB beside the number of virtual GPUs.
    "volcano": Resource("volcano.sh/vgpu-memory", count_key="volcano.sh/vgpu-number"),
    # Volcano's older GPU share plugin: MiB.
    "volcano-share": Resource("volcano.sh/gpu-memory"),
    # Aliyun gpushare-scheduler-extender, docs/userguide: GiB by default.
    "aliyun": Resource("aliyun.com/gpu-mem", unit_mib=_GIB_MIB),
    # KAI scheduler, docs/gpu-sharing: MiB as text, which is not enforced.
    "kai": Resource(
        "gpu-memory",
        annotation=True,
        refused_beside="nvidia.com/gpu",
        scheduler="kai-scheduler",
        queue_label="kai.scheduler/queue",
        container_key="gpu-fraction-container-name",
    ),
}


@dataclass(frozen=True)
class Admission:
    """A pod to be admitted."""

    uid: str
    pod: Mapping[str, Any]


def read_review(body: Any) -> Admission:
    """Read an AdmissionReview."""
    request = body.get("request") if isinstance(body, Mapping) else None
    uid = request.get("uid") if isinstance(request, Mapping) else None
    if not isinstance(request, Mapping) or not isinstance(uid, str):
        raise UserError("expected an AdmissionReview with a request and its uid, found something else: check the path")
    pod = request.get("object")
    return Admission(uid, pod if isinstance(pod, Mapping) else {})


def review_reply(uid: str, patch: list[dict[str, Any]], warning: str | None = None) -> dict[str, Any]:
    """Return a reply that always admits the pod: without a patch it is scheduled as usual."""
    response: dict[str, Any] = {"uid": uid, "allowed": True}
    if patch:
        response |= {"patchType": "JSONPatch", "patch": base64.b64encode(json.dumps(patch).encode()).decode()}
    if warning:
        response["warnings"] = [warning[:250]]  # longer ones may be cut by the API server (admission/v1 types)
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}


def patch_of(pod: Mapping[str, Any], need_mib: float, resource: str, basis: str | None = None) -> list[dict[str, Any]]:
    """Return a JSON Patch that writes the need, unless the pod states its own; an annotation is for the extender.

    `basis` informs people who look at the pod; None if the need is the pod's own.
    """
    check_choice("the resource", resource, RESOURCES)
    rule = RESOURCES[resource]
    whole_mib, amount = math.ceil(need_mib), str(math.ceil(need_mib / rule.unit_mib))
    annotations = annotations_of(pod)
    patch = [] if annotations else [_add("/metadata/annotations", {})]
    if not (isinstance(pod.get("metadata"), Mapping)):
        patch.insert(0, _add("/metadata", {}))
    patch.append(_add(f"/metadata/annotations/{_escaped(NEED)}", str(whole_mib)))
    if basis:
        patch.append(_add(f"/metadata/annotations/{_escaped(BASIS)}", basis))
    if rule.annotation:
        return patch + _annotation_patch(pod, rule, amount)
    return patch + _limits_patch(pod, rule, amount)


def warning_of(pod: Mapping[str, Any], resource: str) -> str | None:
    """Return what a user must change before the scheduler reads the need; None if nothing."""
    rule = RESOURCES[resource]
    metadata, spec = _map(pod.get("metadata")), _map(pod.get("spec"))
    if rule.refused_beside and _container_with(pod, rule.refused_beside) is not None:
        return (
            f"vramcast: {rule.scheduler} refuses {rule.key} beside {rule.refused_beside}: the pod keeps a whole GPU; "
            f"remove the limit {rule.refused_beside} to share one"
        )
    if rule.scheduler and spec.get("schedulerName") != rule.scheduler:
        return f"vramcast: expected schedulerName {rule.scheduler}, which reads {rule.key}, found another: set it"
    if rule.queue_label and rule.queue_label not in _map(metadata.get("labels")):
        return f"vramcast: expected a label {rule.queue_label}, found none: name the pod's queue"
    return None


def _annotation_patch(pod: Mapping[str, Any], rule: Resource, amount: str) -> list[dict[str, Any]]:
    annotations, containers = annotations_of(pod), _containers(pod)
    if rule.key in annotations or (rule.refused_beside and _container_with(pod, rule.refused_beside) is not None):
        return []
    patch = [_add(f"/metadata/annotations/{_escaped(rule.key)}", amount)]
    job_container = annotations.get(CONTAINER)
    if rule.container_key and rule.container_key not in annotations and job_container in containers:
        patch.append(_add(f"/metadata/annotations/{_escaped(rule.container_key)}", job_container))
    return patch


def _containers(pod: Mapping[str, Any]) -> list[str]:
    items = _map(pod.get("spec")).get("containers")
    return [str(_map(item).get("name", "")) for item in items] if isinstance(items, list) else []


def _container_with(pod: Mapping[str, Any], key: str) -> int | None:
    """Return the index of the first container with a limit."""
    items = _map(pod.get("spec")).get("containers")
    limits = [limits_of(item) for item in items] if isinstance(items, list) else []
    return next((index for index, item in enumerate(limits) if key in item), None)


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _limits_patch(pod: Mapping[str, Any], rule: Resource, amount: str) -> list[dict[str, Any]]:
    spec = pod.get("spec")
    containers = spec.get("containers") if isinstance(spec, Mapping) else None
    if not isinstance(containers, list) or not all(isinstance(item, Mapping) for item in containers) or not containers:
        raise UserError("expected a pod with containers, found none: check the object")
    limits = [limits_of(item) for item in containers]
    if any(rule.key in item for item in limits):
        return []
    # the container that requests a GPU, or the first
    index = next((i for i, item in enumerate(limits) if rule.count_key in item), 0)
    path, patch = f"/spec/containers/{index}/resources", []
    if not isinstance(containers[index].get("resources"), Mapping):
        patch.append(_add(path, {}))
    if not limits[index]:
        patch.append(_add(f"{path}/limits", {}))
    if rule.count_key and rule.count_key not in limits[index]:
        patch.append(_add(f"{path}/limits/{_escaped(rule.count_key)}", "1"))
    return [*patch, _add(f"{path}/limits/{_escaped(rule.key)}", amount)]


def _add(path: str, value: Any) -> dict[str, Any]:
    return {"op": "add", "path": path, "value": value}


def _escaped(key: str) -> str:
    """Return a key as a step of a JSON pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")
