"""Dynamic resource allocation (resource.k8s.io): the memory that claims of GPUs request.

With consumable capacity (KEP-5075) a request names the memory that it takes of a shared GPU. An API server without it
drops `capacity`; the CEL selector then leaves whole GPUs that are large enough.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from vramcast.collocation.adapters.json_patch import Patch, add, added, appended
from vramcast.collocation.adapters.kubernetes import MANAGED_BY, containers_of, mapping
from vramcast.collocation.adapters.pod_resources import Figures, main_container
from vramcast.collocation.adapters.pod_resources import patch_of as pod_patch

GPU_CLASS = "gpu.nvidia.com"
"""The DeviceClass of NVIDIA's DRA driver for whole GPUs."""
KINDS: Mapping[str, str] = {"ResourceClaim": "/spec", "ResourceClaimTemplate": "/spec/spec"}
"""The path of the claim in each kind."""
API = "resource.k8s.io/v1"
_CAPACITY = "memory"
_CLAIM = "vramcast"
"""The name of a claim within its pod."""
_STEP_MIB = 128
"""Amounts of our own templates are rounded up to it, so that a namespace has hundreds of them. It is less than what any
driver takes, so that the amount of a job that needs a whole device does not exceed the device."""
_MOST_REQUESTS = 32
"""Of a claim (resource/v1, DeviceRequestsMaxSize)."""


def claim_patch(thing: Mapping[str, Any], figures: Figures, kind: str, device_class: str) -> Patch:
    """Return a JSON Patch that writes the need into each request for the class that names no memory."""
    need_mib = math.ceil(figures.need_mib)
    patch: Patch = []
    for path, request in _requests(thing, kind):
        if request.get("deviceClassName") == device_class:
            patch += _request_patch(path, request, need_mib)
    if not patch:
        return []
    return pod_patch(thing, figures, "dra") + patch  # annotations are the same on all objects


def claim_warning(thing: Mapping[str, Any], kind: str, device_class: str) -> str | None:
    """Return why nothing was written into a claim; None if it names its own memory."""
    classes = sorted({str(request.get("deviceClassName")) for _, request in _requests(thing, kind)})
    if device_class in classes:
        return None
    return f"vramcast: expected a request for the device class {device_class}, found {classes}: see --device-class"


def template_of(need_mib: float, gpus: int, device_class: str) -> dict[str, Any]:
    """Return a template for pods that ask by an annotation; equal needs share one."""
    need_mib = _STEP_MIB * math.ceil(need_mib / _STEP_MIB)
    digest = hashlib.sha256(device_class.encode()).hexdigest()[:8]
    exactly = {
        "deviceClassName": device_class,
        "allocationMode": "ExactCount",
        "count": gpus,
        "capacity": {"requests": {_CAPACITY: f"{need_mib}Mi"}},
        "selectors": [_selector(need_mib)],
    }
    return {
        "apiVersion": API,
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": f"vramcast-{need_mib}mi-{gpus}-{digest}", "labels": {MANAGED_BY: "vramcast"}},
        "spec": {"spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}},
    }


def has_claims(pod: Mapping[str, Any]) -> bool:
    """Return True if a pod has claims of its own, which are filled in where they are made."""
    return bool(mapping(pod.get("spec")).get("resourceClaims"))


def reference_patch(pod: Mapping[str, Any], template: str, path: str = "") -> Patch:
    """Return a JSON Patch by which a pod takes its claim from a template."""
    index = main_container(pod)
    claims = mapping(pod.get("spec")).get("resourceClaims")
    claim = {"name": _CLAIM, "resourceClaimTemplateName": template}
    patch = [appended(f"{path}/spec/resourceClaims", claims, claim)]
    resources = containers_of(pod)[index].get("resources")
    at = f"{path}/spec/containers/{index}/resources"
    if not isinstance(resources, Mapping):
        patch.append(add(at, {}))
    return [*patch, appended(f"{at}/claims", mapping(resources).get("claims"), {"name": _CLAIM})]


def _requests(thing: Mapping[str, Any], kind: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the requests of a claim with their paths: exact ones, and each alternative of the others."""
    path, spec = KINDS[kind], mapping(thing.get("spec"))
    devices = mapping((spec if path == "/spec" else mapping(spec.get("spec"))).get("devices"))
    requests = devices.get("requests")
    for index, item in enumerate(requests[:_MOST_REQUESTS] if isinstance(requests, list) else []):
        at, request = f"{path}/devices/requests/{index}", mapping(item)
        if isinstance(request.get("exactly"), Mapping):
            yield f"{at}/exactly", request["exactly"]
        alternatives = request.get("firstAvailable")
        for number, other in enumerate(alternatives[:_MOST_REQUESTS] if isinstance(alternatives, list) else []):
            yield f"{at}/firstAvailable/{number}", mapping(other)


def _request_patch(path: str, request: Mapping[str, Any], need_mib: int) -> Patch:
    capacity = mapping(request.get("capacity"))
    amounts = capacity.get("requests")
    if _CAPACITY in mapping(amounts):
        return []
    start = [] if isinstance(request.get("capacity"), Mapping) else [add(f"{path}/capacity", {})]
    patch = start + added(f"{path}/capacity/requests", amounts, {_CAPACITY: f"{need_mib}Mi"})
    return [*patch, appended(f"{path}/selectors", request.get("selectors"), _selector(need_mib))]


def _selector(need_mib: int) -> dict[str, Any]:
    """Return a selector of GPUs that are large enough; one that states no memory is never left out."""
    memory = f"device.capacity[device.driver].{_CAPACITY}"
    return {"cel": {"expression": f'!has({memory}) || {memory}.compareTo(quantity("{need_mib}Mi")) >= 0'}}
