"""Requests and replies of kube-scheduler's extender (kubernetes, pkg/scheduler/extender.go).

Its types carry no JSON tags, so keys are Go names. Go reads them in any case, and so does this module.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vramcast.collocation.placement import GpuState, Need, rank, refusals
from vramcast.errors import UserError

JOB, NEED, RISK, BASIS = "vramcast/job", "vramcast/need-mib", "vramcast/risk", "vramcast/basis"
"""Annotations of a pod: its job; its need, written by the webhook; the risk that the need is too low; and the basis of
the need (forecast or observed), also written by the webhook."""
COUNT = "vramcast/gpu-count"
"""Annotation of a pod whose GPUs no limit counts: the number of its GPUs."""
GPUS = "vramcast/gpus"
"""Annotation of a node: [{"id", "free_mib", "total_mib", "device"}, ...]."""
HAMI_GPUS = "hami.io/node-nvidia-register"
"""HAMi's annotation of a node (pkg/device/nvidia/device.go): which GPUs there are, not what is free on them."""
TOO_LITTLE_FREE = "node(s) had too little free GPU memory"
TOO_SMALL = "node(s) had GPUs that are too small"
"""Reasons without figures: kube-scheduler samples nodes and puts their reasons into the pod's message. A message that
changes requeues the pod at once, again and again."""
GPU_COUNTS = ("nvidia.com/gpu", "volcano.sh/vgpu-number")
"""Limits of a container that say how many GPUs it takes."""
MANAGED_BY = "app.kubernetes.io/managed-by"
MOST_NODES = 20_000
"""In one request; Kubernetes supports clusters of 5,000."""
MOST_GPUS = 128
"""Of a node: 16 GPUs in 7 MIG slices are 112."""
_LONGEST_ANNOTATION = 64 << 10
_LONGEST_TEXT = 100
_LONGEST_UID = 512
_LARGEST_MIB = 2**30
_HIGHEST = 10
"""MaxExtenderPriority, kube-scheduler extender/v1."""

Object = Mapping[str, Any]


@dataclass(frozen=True)
class ExtenderArgs:
    """A pod and the nodes that it could go to: as objects, or as names of nodes that were sent before."""

    pod: Object
    nodes: Sequence[Object] | None
    names: Sequence[str]


def read_args(body: Any) -> ExtenderArgs:
    """Read ExtenderArgs, with keys in any case."""
    if not isinstance(body, Mapping):
        raise UserError(f"expected ExtenderArgs as an object, found {type(body).__name__}: check urlPrefix and verb")
    keys = {str(key).lower(): value for key, value in body.items()}
    pod, nodes, names = keys.get("pod"), keys.get("nodes"), keys.get("nodenames")
    if not isinstance(pod, Mapping):
        raise UserError(f"expected ExtenderArgs with a Pod, found {sorted(body)[:10]}: check urlPrefix and verb")
    if nodes is not None:
        items = {str(key).lower(): value for key, value in mapping(nodes).items()}.get("items")
        if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
            raise UserError("expected Nodes with a list of items, found something else: check the scheduler's version")
        return ExtenderArgs(pod, items, [name_of(item) for item in items])
    if not isinstance(names, list) or not all(isinstance(item, str) for item in names):
        raise UserError("expected Nodes or NodeNames, found neither: check the scheduler's version")
    if len(names) > MOST_NODES:
        raise UserError(f"expected at most {MOST_NODES} nodes, found {len(names)}: set nodeCacheCapable to false")
    return ExtenderArgs(pod, None, names)


def annotations_of(thing: Object) -> Mapping[str, str]:
    """Return the annotations of a pod or a node that are text, as all should be."""
    annotations = mapping(mapping(thing.get("metadata")).get("annotations"))
    return {key: value for key, value in annotations.items() if isinstance(value, str)}


def name_of(thing: Object) -> str:
    """Return the name of an object."""
    return str(mapping(thing.get("metadata")).get("name", ""))


def uid_of(pod: Object) -> str:
    """Return the UID of a pod, or its namespace and name."""
    metadata = mapping(pod.get("metadata"))
    return str(metadata.get("uid") or f"{metadata.get('namespace', '')}/{metadata.get('name', '')}")[:_LONGEST_UID]


def gpu_count(pod: Object) -> int:
    """Return the number of GPUs that the containers of a pod ask for, at least one."""
    counts = [str(limits_of(item).get(key, "")) for item in containers_of(pod) for key in GPU_COUNTS]
    total = sum(int(text) for text in counts if text.isdecimal() and len(text) < 6)
    stated = annotations_of(pod).get(COUNT, "")
    if not total and stated.isdecimal() and len(stated) < 4:
        total = min(int(stated), MOST_GPUS)
    return max(1, total)


def containers_of(pod: Object) -> list[Object]:
    """Return the containers of a pod."""
    items = mapping(pod.get("spec")).get("containers")
    return [mapping(item) for item in items] if isinstance(items, list) else []


def limits_of(container: Any) -> Object:
    """Return the resource limits of a container."""
    return mapping(mapping(mapping(container).get("resources")).get("limits"))


def gpus_of(node: Object, device_of: Callable[[str], str | None]) -> list[GpuState] | None:
    """Return the GPUs in the annotations of a node; None if there are none, or none that can be read.

    `device_of` finds the device profile of a GPU's name.
    """
    annotations = annotations_of(node)
    for key, read in ((GPUS, _plain), (HAMI_GPUS, _hami)):
        if key in annotations:
            try:
                return _checked(read(annotations[key][: _LONGEST_ANNOTATION + 1], name_of(node), device_of))
            except Exception:  # whatever a node says, pods are scheduled
                return None
    return None


def _checked(gpus: list[GpuState]) -> list[GpuState]:
    """Refuse more GPUs than a node can have, and amounts that are no amounts: all of this is kept in memory."""
    if len(gpus) > MOST_GPUS:
        raise ValueError("too many GPUs")
    for gpu in gpus:
        amounts = (gpu.free_mib, gpu.total_mib or 0)
        if len(gpu.id) > _LONGEST_TEXT or not all(0 <= amount <= _LARGEST_MIB for amount in amounts):
            raise ValueError("a GPU with impossible values")
    return gpus


def _plain(text: str, node: str, device_of: Callable[[str], str | None]) -> list[GpuState]:
    items = _items(text)
    return [
        GpuState(
            str(item["id"]), float(item["free_mib"]), float(item["total_mib"]), _device(item.get("device"), device_of),
            node, int(item.get("jobs", 0)),
        )
        for item in items
    ]  # fmt: skip


def _hami(text: str, node: str, device_of: Callable[[str], str | None]) -> list[GpuState]:
    """Read JSON since HAMi 2.6; before that 'ID,slots,MiB,cores,type,NUMA,healthy[,...]:' for each GPU."""
    if text.lstrip().startswith("["):
        gpus = [(item["id"], item["devmem"], item.get("type", ""), item.get("health", True)) for item in _items(text)]
    else:
        parts = [item.split(",") for item in text.split(":", MOST_GPUS + 1) if item]
        gpus = [(item[0], int(item[2]), item[4], item[6].lower() == "true") for item in parts]
    return [
        GpuState(str(id_), float(mib), float(mib), _device(kind, device_of), node)
        for id_, mib, kind, healthy in gpus
        if healthy
    ]


def _items(text: str) -> list[Any]:
    """Return a JSON list of at most as many items as a node can have GPUs."""
    items = json.loads(text)
    if not isinstance(items, list) or len(items) > MOST_GPUS:
        raise ValueError("no list of GPUs")
    return items


def _device(name: Any, device_of: Callable[[str], str | None]) -> str | None:
    return device_of(name) if isinstance(name, str) and len(name) <= _LONGEST_TEXT else None


GpusByNode = Mapping[str, list[GpuState] | None]
"""GPUs by node; None for a node whose GPUs are unknown."""


@dataclass(frozen=True)
class Verdict:
    """The nodes that a pod may go to, and the reasons why it may not go to the others."""

    fitting: Collection[str]
    failed: Mapping[str, str]
    unresolvable: Mapping[str, str]

    @property
    def reasons(self) -> Mapping[str, str]:
        """The reason for each node that does not fit."""
        return {**self.failed, **self.unresolvable}


def judge(need: Need, count: int, gpus_by_node: GpusByNode) -> Verdict:
    """Decide which nodes have `count` GPUs with room. A node with unknown GPUs is never refused."""
    fitting: list[str] = []
    failed: dict[str, str] = {}
    unresolvable: dict[str, str] = {}
    for name, gpus in gpus_by_node.items():
        if gpus is None or len(rank(need, gpus)) >= count:
            fitting.append(name)
            continue
        refused = refusals(need, gpus)
        reason = refused[0].reason if refused else f"wants {count} GPUs, the node has {len(gpus)}"
        large_enough = len(gpus) - sum(item.for_good for item in refused)
        (failed if large_enough >= count else unresolvable)[name] = reason
    return Verdict(fitting, failed, unresolvable)


def filter_reply(args: ExtenderArgs, verdict: Verdict) -> dict[str, Any]:
    """Return an ExtenderFilterResult, with nodes in the form in which they came, and with constant reasons."""
    fitting = set(verdict.fitting)
    names = [name for name in args.names if name in fitting]
    nodes = None if args.nodes is None else {"items": [item for item in args.nodes if name_of(item) in fitting]}
    return {
        "Nodes": nodes,
        "NodeNames": names if args.nodes is None else None,
        "FailedNodes": dict.fromkeys(verdict.failed, TOO_LITTLE_FREE),
        "FailedAndUnresolvableNodes": dict.fromkeys(verdict.unresolvable, TOO_SMALL),
        "Error": "",
    }


def filter_failed(sentence: str) -> dict[str, Any]:
    """Return an ExtenderFilterResult with an error, which the scheduler ignores under `ignorable: true`."""
    return {"Nodes": None, "NodeNames": None, "FailedNodes": {}, "FailedAndUnresolvableNodes": {}, "Error": sentence}


def prioritize_reply(
    need: Need | None, count: int, names: Sequence[str], gpus_by_node: GpusByNode, policy: str
) -> list[dict[str, Any]]:
    """Return a HostPriorityList: 0 to 10 by policy; 0 if `count` GPUs do not fit, or the GPUs of a node are unknown."""
    return [{"Host": name, "Score": _score(need, count, gpus_by_node.get(name), policy)} for name in names]


def _score(need: Need | None, count: int, gpus: list[GpuState] | None, policy: str) -> int:
    ranked = rank(need, gpus, policy) if need is not None and gpus else []
    if len(ranked) < count:
        return 0
    if policy not in ("best-fit", "most-free"):
        return _HIGHEST
    left = ranked[0].left_mib / max(ranked[0].gpu.total_mib or 0, 1)
    return round(_HIGHEST * min(1.0, max(0.0, left if policy == "most-free" else 1 - left)))


def mapping(value: Any) -> Object:
    """Return an object, or an empty one in place of anything else."""
    return value if isinstance(value, Mapping) else {}
