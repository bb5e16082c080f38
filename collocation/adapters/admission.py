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


@dataclass(frozen=True)
class Resource:
    """The resource that a scheduler reads the need from."""

    key: str
    unit_mib: int = 1
    count_key: str | None = None
    """A resource that must be present for the amount to count."""
    annotation: bool = False
    """True for an annotation of the pod instead of a limit of its container."""


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
    "kai": Resource("gpu-memory", annotation=True),
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
        return patch if rule.key in annotations else [*patch, _add(f"/metadata/annotations/{rule.key}", amount)]
    return patch + _limits_patch(pod, rule, amount)


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
