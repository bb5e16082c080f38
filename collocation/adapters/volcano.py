"""Requests and replies of Volcano's extender plugin (pkg/scheduler/plugins/extender)."""

from collections.abc import Mapping
from typing import Any

from vramcast.errors import UserError

_FAILED = 1


def read_task(body: Any) -> Mapping[str, Any]:
    """Return the pod of a task, whose fields are Go names."""
    task = _field(body, "task")
    pod = _field(task, "pod")
    if not isinstance(pod, Mapping):
        raise UserError("expected a task with its Pod, found none: check extender.urlPrefix and the verb")
    return pod


def read_node(info: Any) -> Mapping[str, Any]:
    """Return the node of a NodeInfo."""
    node = _field(info, "node")
    if not isinstance(node, Mapping):
        raise UserError("expected a node with its Node, found none: check extender.urlPrefix and the verb")
    return node


def read_nodes(body: Any) -> list[Mapping[str, Any]]:
    """Return the nodes of a prioritize request."""
    nodes = _field(body, "nodes")
    if not isinstance(nodes, list):
        raise UserError("expected a list of nodes, found none: check extender.urlPrefix and the verb")
    return [read_node(item) for item in nodes]


def predicate_reply(reason: str | None) -> dict[str, Any]:
    """Return code 0 for a node that the task may go to."""
    return {"status": reason or "", "code": _FAILED if reason else 0}


def prioritize_reply(scores: Mapping[str, float]) -> dict[str, Any]:
    """Return a score for each node."""
    return {"nodeScore": dict(scores), "errorMessage": ""}


def _field(value: Any, name: str) -> Any:
    if not isinstance(value, Mapping):
        return None
    return next((item for key, item in value.items() if str(key).lower() == name), None)
