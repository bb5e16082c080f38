"""The resources that schedulers read a pod's need from, and the patch that writes them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vramcast.collocation.adapters.json_patch import Patch, added
from vramcast.collocation.adapters.kubernetes import BASIS, NEED, annotations_of, containers_of, limits_of, mapping
from vramcast.errors import UserError, check_choice

_GIB_MIB = 1024
CONTAINER = "kubectl.kubernetes.io/default-container"
"""The annotation by which a pod names its main container."""
WHOLE_GPU = "nvidia.com/gpu"
DRA = "dra"
"""The resource that is no key of a pod, but a claim: see `claims`."""


@dataclass(frozen=True)
class Figures:
    """The memory of a job on each of its GPUs, for a pod."""

    need_mib: float
    """The memory to reserve: the safe figure."""
    estimate_mib: float | None = None
    """The most likely figure; None if only the need is known."""
    basis: str | None = None
    """The source of the need, for people who look at the pod; None if the pod states it."""


@dataclass(frozen=True)
class Resource:
    """The resource that a scheduler reads the need from."""

    key: str
    unit_mib: int = 1
    count_key: str | None = None
    """A resource that must be present for the amount to count."""
    annotation: bool = False
    """True for an annotation of the pod instead of a limit of its container."""
    estimate_key: str | None = None
    """An annotation for the estimate beside the bound; `{}` stands for the container, as in `key`."""
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
    "hami": Resource("nvidia.com/gpumem", count_key=WHOLE_GPU),
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
        refused_beside=WHOLE_GPU,
        scheduler="kai-scheduler",
        queue_label="kai.scheduler/queue",
        container_key="gpu-fraction-container-name",
    ),
    # KAI's NvFractions: quantities for a container, the estimate as its request and the need as its limit.
    "kai-container": Resource(
        "nvidia.com/container.{}.gpu-memory.limit",
        annotation=True,
        estimate_key="nvidia.com/container.{}.gpu-memory.request",
        refused_beside=WHOLE_GPU,
        scheduler="kai-scheduler",
        queue_label="kai.scheduler/queue",
    ),
    # Dynamic resource allocation: the memory of a ResourceClaim.
    DRA: Resource("resourceClaims", refused_beside=WHOLE_GPU),
}


def patch_of(pod: Mapping[str, Any], figures: Figures, resource: str, path: str = "") -> Patch:
    """Return a JSON Patch that writes figures into the pod at a path, unless the pod states its own.

    The need is written as an annotation, too, for the extender. A claim is not written here: see `claims`.
    """
    check_choice("the resource", resource, RESOURCES)
    rule = RESOURCES[resource]
    notes = {NEED: str(math.ceil(figures.need_mib))} | ({BASIS: figures.basis} if figures.basis else {})
    if rule.annotation:
        notes |= _annotations(pod, rule, figures)
    metadata = pod.get("metadata")
    patch = [] if isinstance(metadata, Mapping) else [{"op": "add", "path": f"{path}/metadata", "value": {}}]
    patch += added(f"{path}/metadata/annotations", mapping(metadata).get("annotations"), notes)
    return patch if rule.annotation or resource == DRA else patch + _limits(pod, rule, figures, path)


def warning_of(pod: Mapping[str, Any], resource: str) -> str | None:
    """Return what a user must change before the scheduler reads the need; None if nothing."""
    rule = RESOURCES[resource]
    metadata, spec = mapping(pod.get("metadata")), mapping(pod.get("spec"))
    if rule.refused_beside and has_limit(pod, rule.refused_beside):
        return (
            f"vramcast: {rule.scheduler or 'a claim'} refuses {rule.key.format('NAME')} beside {rule.refused_beside}: "
            f"the pod keeps a whole GPU; remove the limit {rule.refused_beside} to share one"
        )
    if rule.scheduler and spec.get("schedulerName") != rule.scheduler:
        key = rule.key.format("NAME")
        return f"vramcast: expected schedulerName {rule.scheduler}, which reads {key}, found another: set it"
    if rule.queue_label and rule.queue_label not in mapping(metadata.get("labels")):
        return f"vramcast: expected a label {rule.queue_label}, found none: name the pod's queue"
    return None


def has_limit(pod: Mapping[str, Any], key: str) -> bool:
    """Return True if a container of a pod has a limit."""
    return any(key in limits_of(item) for item in containers_of(pod))


def main_container(pod: Mapping[str, Any], count_key: str | None = None) -> int:
    """Return the index of the container that the job runs in: named, or with a GPU, or the first."""
    containers = containers_of(pod)
    if not containers:
        raise UserError("expected a pod with containers, found none: check the object")
    names, named = [item.get("name") for item in containers], annotations_of(pod).get(CONTAINER)
    with_gpu = next((index for index, item in enumerate(containers) if count_key in limits_of(item)), None)
    return with_gpu if with_gpu is not None else names.index(named) if named in names else 0


def _annotations(pod: Mapping[str, Any], rule: Resource, figures: Figures) -> dict[str, str]:
    notes, need = annotations_of(pod), str(math.ceil(figures.need_mib / rule.unit_mib))
    if rule.refused_beside and has_limit(pod, rule.refused_beside):
        return {}
    container = str(containers_of(pod)[main_container(pod)].get("name", ""))
    key = rule.key.format(container)
    if key in notes:
        return {}
    if rule.estimate_key:
        estimate_mib = min(figures.estimate_mib or figures.need_mib, figures.need_mib)
        return {rule.estimate_key.format(container): f"{math.ceil(estimate_mib)}Mi", key: f"{need}Mi"}
    if rule.container_key and rule.container_key not in notes and CONTAINER in notes:
        return {key: need, rule.container_key: container}
    return {key: need}


def _limits(pod: Mapping[str, Any], rule: Resource, figures: Figures, path: str) -> Patch:
    index = main_container(pod, rule.count_key)
    if has_limit(pod, rule.key):
        return []
    container = containers_of(pod)[index]
    limits = {rule.key: str(math.ceil(figures.need_mib / rule.unit_mib))}
    if rule.count_key and rule.count_key not in limits_of(container):
        limits = {rule.count_key: "1", **limits}
    path = f"{path}/spec/containers/{index}/resources"
    resources = container.get("resources")
    start = [] if isinstance(resources, Mapping) else [{"op": "add", "path": path, "value": {}}]
    return start + added(f"{path}/limits", mapping(resources).get("limits"), limits)
