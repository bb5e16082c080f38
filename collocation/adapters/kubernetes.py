"""The scheduler extender: kube-scheduler's questions and answers (kubernetes, pkg/scheduler/extender.go).

Its types carry no JSON tags, so keys are Go names. Go reads them in any case, and so does this.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vramcast.collocation.placement import GpuState, Need, rank, refusals
from vramcast.errors import UserError

JOB, NEED, RISK, BASIS = "vramcast/job", "vramcast/need-mib", "vramcast/risk", "vramcast/basis"
"""Annotations of a pod: what it trains; what to set aside, which the webhook writes; how often that may be low; and
whether it was forecast or observed, which the webhook writes too."""
GPUS = "vramcast/gpus"
"""Annotation of a node: [{"id", "free_mib", "total_mib", "device"}, ...]."""
HAMI_GPUS = "hami.io/node-nvidia-register"
"""HAMi's annotation of a node (pkg/device/nvidia/device.go): what cards there are, not what is free on them."""
_GPU_COUNTS = ("nvidia.com/gpu", "volcano.sh/vgpu-number")
_HIGHEST = 10
"""MaxExtenderPriority, kube-scheduler extender/v1."""

Object = Mapping[str, Any]


@dataclass(frozen=True)
class ExtenderArgs:
    """A pod, and the nodes that it could go to: whole, or by name alone where the extender knows them."""

    pod: Object
    nodes: Sequence[Object] | None
    names: Sequence[str]


def read_args(body: Any) -> ExtenderArgs:
    """Of a request, whatever the case of its keys."""
    if not isinstance(body, Mapping):
        raise UserError(f"expected ExtenderArgs as an object, found {type(body).__name__}: check urlPrefix and verb")
    keys = {str(key).lower(): value for key, value in body.items()}
    pod, nodes, names = keys.get("pod"), keys.get("nodes"), keys.get("nodenames")
    if not isinstance(pod, Mapping):
        raise UserError(f"expected ExtenderArgs with a Pod, found {sorted(body)[:10]}: check urlPrefix and verb")
    if nodes is not None:
        items = {str(key).lower(): value for key, value in _map(nodes).items()}.get("items")
        if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
            raise UserError("expected Nodes with a list of items, found something else: check the scheduler's version")
        return ExtenderArgs(pod, items, [name_of(item) for item in items])
    if not isinstance(names, list) or not all(isinstance(item, str) for item in names):
        raise UserError("expected Nodes or NodeNames, found neither: check the scheduler's version")
    return ExtenderArgs(pod, None, names)


def annotations_of(thing: Object) -> Mapping[str, str]:
    """Of a pod or a node; only those that are text, as all should be."""
    found = _map(_map(thing.get("metadata")).get("annotations"))
    return {key: value for key, value in found.items() if isinstance(value, str)}


def name_of(thing: Object) -> str:
    """The object's name."""
    return str(_map(thing.get("metadata")).get("name", ""))


def gpu_count(pod: Object) -> int:
    """How many GPUs the pod's containers ask for, at least one."""
    containers = _map(pod.get("spec")).get("containers")
    limits = [limits_of(item) for item in containers] if isinstance(containers, list) else []
    asked = [str(item.get(key, "")) for item in limits for key in _GPU_COUNTS]
    return max(1, sum(int(text) for text in asked if text.isdecimal() and len(text) < 6))


def limits_of(container: Any) -> Object:
    """What a container may take at most."""
    return _map(_map(_map(container).get("resources")).get("limits"))


def gpus_of(node: Object, device_of: Callable[[str], str | None]) -> list[GpuState] | None:
    """The GPUs of a node as its annotations tell; None where they tell nothing, or nothing that can be read.

    `device_of` finds the device profile of a card's name.
    """
    annotations = annotations_of(node)
    for key, read in ((GPUS, _plain), (HAMI_GPUS, _hami)):
        if key in annotations:
            try:
                return read(annotations[key], name_of(node), device_of)
            except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
                return None
    return None


def _plain(text: str, node: str, _: Callable[[str], str | None]) -> list[GpuState]:
    items = json.loads(text)
    return [
        GpuState(
            str(item["id"]), float(item["free_mib"]), float(item["total_mib"]), item.get("device"), node,
            int(item.get("jobs", 0)),
        )
        for item in items
    ]  # fmt: skip


def _hami(text: str, node: str, device_of: Callable[[str], str | None]) -> list[GpuState]:
    """JSON since HAMi 2.6; before that 'ID,slots,MiB,cores,type,NUMA,healthy[,...]:' for each card."""
    if text.lstrip().startswith("["):
        cards = [
            (item["id"], item["devmem"], item.get("type", ""), item.get("health", True)) for item in json.loads(text)
        ]
    else:
        parts = [item.split(",") for item in text.split(":") if item]
        cards = [(item[0], int(item[2]), item[4], item[6].lower() == "true") for item in parts]
    return [
        GpuState(str(id_), float(mib), float(mib), device_of(kind), node)
        for id_, mib, kind, healthy in cards
        if healthy
    ]


Known = Mapping[str, list[GpuState] | None]
"""GPUs by node; None where nothing is known of one."""


@dataclass(frozen=True)
class Verdict:
    """Which nodes a pod may go to; the others with their reasons."""

    fitting: Collection[str]
    failed: Mapping[str, str]
    unresolvable: Mapping[str, str]

    @property
    def reasons(self) -> Mapping[str, str]:
        """Why each node that does not fit does not."""
        return {**self.failed, **self.unresolvable}


def judge(need: Need, count: int, known: Known) -> Verdict:
    """A node fits with `count` GPUs that have room. Of one that nobody knows nothing is said: it stays."""
    fitting: list[str] = []
    failed: dict[str, str] = {}
    unresolvable: dict[str, str] = {}
    for name, gpus in known.items():
        if gpus is None or len(rank(need, gpus)) >= count:
            fitting.append(name)
            continue
        refused = refusals(need, gpus)
        reason = refused[0].reason if refused else f"wants {count} GPUs, the node has {len(gpus)}"
        could = len(gpus) - sum(item.for_good for item in refused)
        (failed if could >= count else unresolvable)[name] = reason
    return Verdict(fitting, failed, unresolvable)


def filter_reply(args: ExtenderArgs, verdict: Verdict) -> dict[str, Any]:
    """ExtenderFilterResult; nodes come back in the form in which they came."""
    names = [name for name in args.names if name in set(verdict.fitting)]
    nodes = None if args.nodes is None else {"items": [item for item in args.nodes if name_of(item) in set(names)]}
    return {
        "Nodes": nodes,
        "NodeNames": names if args.nodes is None else None,
        "FailedNodes": dict(verdict.failed),
        "FailedAndUnresolvableNodes": dict(verdict.unresolvable),
        "Error": "",
    }


def filter_failed(sentence: str) -> dict[str, Any]:
    """What cannot be judged is said; with `ignorable: true` the scheduler goes on without us."""
    return {"Nodes": None, "NodeNames": None, "FailedNodes": {}, "FailedAndUnresolvableNodes": {}, "Error": sentence}


def prioritize_reply(need: Need | None, names: Sequence[str], known: Known, policy: str) -> list[dict[str, Any]]:
    """HostPriorityList: 0 to 10 by what a policy likes; 0 where nothing is known or nothing fits."""
    return [{"Host": name, "Score": _score(need, known.get(name), policy)} for name in names]


def _score(need: Need | None, gpus: list[GpuState] | None, policy: str) -> int:
    ranked = rank(need, gpus, policy) if need is not None and gpus else []
    if not ranked:
        return 0
    if policy not in ("best-fit", "most-free"):
        return _HIGHEST
    left = ranked[0].left_mib / max(ranked[0].gpu.total_mib or 0, 1)
    return round(_HIGHEST * min(1.0, left if policy == "most-free" else 1 - left))


def _map(value: Any) -> Object:
    """An object, or an empty one in the place of anything else."""
    return value if isinstance(value, Mapping) else {}
