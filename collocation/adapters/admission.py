"""The mutating admission webhook (admission.k8s.io/v1): reviews of pods, of claims, and of jobs that make pods."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vramcast.collocation.adapters import claims, pod_resources, workloads
from vramcast.collocation.adapters.json_patch import Patch
from vramcast.collocation.adapters.kubernetes import gpu_count, mapping
from vramcast.collocation.adapters.pod_resources import DRA, WHOLE_GPU, Figures
from vramcast.errors import UserError

_LONGEST_WARNING = 250
"""Longer ones may be cut by the API server (admission/v1 types)."""
_POD = "Pod"


@dataclass(frozen=True)
class Admission:
    """An object that is to be admitted."""

    uid: str
    kind: str
    thing: Mapping[str, Any]
    namespace: str = ""
    dry_run: bool = False
    """True if nothing may change beside the reply."""


@dataclass(frozen=True)
class Part:
    """A part of an object with a job: a pod, a claim, or one of several pod templates."""

    path: str
    """Its JSON pointer; empty for the whole object."""
    thing: Mapping[str, Any]
    pod: Mapping[str, Any]
    """The same with the annotations that it inherits."""


def read_review(body: Any) -> Admission:
    """Read an AdmissionReview."""
    request = body.get("request") if isinstance(body, Mapping) else None
    uid = request.get("uid") if isinstance(request, Mapping) else None
    if not isinstance(request, Mapping) or not isinstance(uid, str):
        raise UserError("expected an AdmissionReview with a request and its uid, found something else: check the path")
    kind = str(mapping(request.get("kind")).get("kind") or _POD)
    namespace = str(request.get("namespace") or "")
    return Admission(uid, kind, mapping(request.get("object")), namespace, request.get("dryRun") is True)


def parts_of(review: Admission) -> list[Part]:
    """Return the parts of an object that may have jobs; none for a kind that is not known."""
    if review.kind in workloads.KINDS:
        return [
            Part(path, template, workloads.pod_of(review.thing, template))
            for path, template in workloads.pod_templates(review.thing, review.kind)
        ]
    is_one = review.kind == _POD or review.kind in claims.KINDS
    return [Part("", review.thing, review.thing)] if is_one else []


@dataclass(frozen=True)
class Admitted:
    """A part of an object as it is admitted: the change of it."""

    patch: Patch
    template: Mapping[str, Any] | None = None
    """A ResourceClaimTemplate that must exist for the patch."""
    warning: str | None = None


def change_of(review: Admission, part: Part, figures: Figures, resource: str, device_class: str) -> Admitted:
    """Return the change that writes the figures of its job into a part."""
    if review.kind in claims.KINDS:
        if resource != DRA:
            return Admitted([], warning="vramcast: expected --resource dra for claims, found another: see the service")
        patch = claims.claim_patch(part.thing, figures, review.kind, device_class)
        return Admitted(patch, warning=claims.claim_warning(part.thing, review.kind, device_class))
    patch = pod_resources.patch_of(part.thing, figures, resource, part.path)
    warning = pod_resources.warning_of(part.thing, resource)
    if resource != DRA or claims.has_claims(part.thing) or pod_resources.has_limit(part.thing, WHOLE_GPU):
        return Admitted(patch, warning=warning)
    template = claims.template_of(figures.need_mib, gpu_count(part.pod), device_class)
    reference = claims.reference_patch(part.thing, template["metadata"]["name"], part.path)
    return Admitted(patch + reference, template, warning)


def review_reply(uid: str, patch: Patch, warnings: Sequence[str] = ()) -> dict[str, Any]:
    """Return a reply that always admits the object: without a patch it is scheduled as usual."""
    response: dict[str, Any] = {"uid": uid, "allowed": True}
    if patch:
        response |= {"patchType": "JSONPatch", "patch": base64.b64encode(json.dumps(patch).encode()).decode()}
    if warnings:
        response["warnings"] = [text[:_LONGEST_WARNING] for text in warnings]
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
