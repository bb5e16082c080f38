"""The pod templates of jobs that controllers turn into pods, often one for each rank.

A workload is patched when it is created, because Kueue admits it by the resources of its templates, before any pod
exists. The figures count for each GPU, so that every rank gets its own.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from vramcast.collocation.adapters.json_patch import escaped
from vramcast.collocation.adapters.kubernetes import (
    GPU_COUNTS,
    JOB,
    NEED,
    annotations_of,
    containers_of,
    limits_of,
    mapping,
)

KINDS = ("Job", "JobSet", "LeaderWorkerSet", "MPIJob", "PyTorchJob", "RayCluster", "RayJob")
_MOST_TEMPLATES = 64
_OWN = "vramcast/"
"""Annotations that a template takes from its workload."""

Template = tuple[str, Mapping[str, Any]]
"""A pod template with its path in the workload."""


def pod_templates(thing: Mapping[str, Any], kind: str) -> list[Template]:
    """Return the templates of the pods that train.

    A template may state a job of its own. The job of the workload goes to the templates with a GPU; if none asks for
    one by a limit (claims, annotations), to all.
    """
    templates = list(_templates(mapping(thing.get("spec")), kind))[:_MOST_TEMPLATES]
    with_gpus = [path for path, template in templates if _has_gpu(template)]
    inherited = (with_gpus or [path for path, _ in templates]) if _states_job(thing) else []
    return [(path, template) for path, template in templates if path in inherited or _states_job(template)]


def pod_of(thing: Mapping[str, Any], template: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a template with the annotations of its workload beneath its own, to be read as a pod."""
    metadata = mapping(template.get("metadata"))
    job = {key: value for key, value in annotations_of(thing).items() if key.startswith(_OWN)}
    name = mapping(thing.get("metadata")).get("name", "")
    return {**template, "metadata": {**metadata, "name": name, "annotations": {**job, **annotations_of(template)}}}


def _templates(spec: Mapping[str, Any], kind: str) -> Iterator[Template]:
    if kind == "Job":
        yield from _one("/template", spec.get("template"))
    elif kind == "JobSet":
        for path, item in _items(spec, "replicatedJobs", "template"):
            yield from _one(f"{path}/spec/template", mapping(mapping(item).get("spec")).get("template"))
    elif kind == "LeaderWorkerSet":
        for name in ("leaderTemplate", "workerTemplate"):
            yield from _one(f"/leaderWorkerTemplate/{name}", mapping(spec.get("leaderWorkerTemplate")).get(name))
    elif kind in ("RayCluster", "RayJob"):
        prefix, cluster = ("/rayClusterSpec", mapping(spec.get("rayClusterSpec"))) if kind == "RayJob" else ("", spec)
        yield from _one(f"{prefix}/headGroupSpec/template", mapping(cluster.get("headGroupSpec")).get("template"))
        for path, item in _items(cluster, "workerGroupSpecs", "template"):
            yield from _one(f"{prefix}{path}", item)
    else:  # PyTorchJob: pytorchReplicaSpecs.Worker.template, MPIJob: mpiReplicaSpecs.Worker.template
        for key, replicas in spec.items():
            for role, item in mapping(replicas).items() if key.endswith("ReplicaSpecs") else ():
                yield from _one(f"/{escaped(key)}/{escaped(role)}/template", mapping(item).get("template"))


def _items(spec: Mapping[str, Any], key: str, name: str) -> Iterator[tuple[str, Any]]:
    items = spec.get(key)
    for index, item in enumerate(items if isinstance(items, list) else []):
        yield f"/{key}/{index}/{name}", mapping(item).get(name)


def _one(path: str, template: Any) -> Iterator[Template]:
    """Yield a pod template if it is one."""
    if isinstance(template, Mapping) and containers_of(template):
        yield f"/spec{path}", template


def _states_job(thing: Mapping[str, Any]) -> bool:
    return not {JOB, NEED}.isdisjoint(annotations_of(thing))


def _has_gpu(template: Mapping[str, Any]) -> bool:
    return any(key in limits_of(item) for item in containers_of(template) for key in GPU_COUNTS)
