"""Which tensors a compiled graph allocates, in which order, and when they are freed: a rule in place of Inductor's.

A loop is fused into its consumers. Its result exists if a library's kernel or an output reads it, or if it is a
reduction. A result may take the memory of an operand of the same size that dies there. Cheap loops run where they are
first needed, because recomputed ones stand first in a backward graph; casts of outputs run at once.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from vramcast.virtual_gpu.compiled.node_kinds import NodeKind, kinds_of, tensors_of

_HAS_MEMORY = (NodeKind.LIBRARY, NodeKind.OPAQUE, NodeKind.INPUT, NodeKind.CONSTANT)
_PASSES_ON = (NodeKind.VIEW, NodeKind.ITEM)
_CONSUMERS = (NodeKind.LIBRARY, NodeKind.OPAQUE, NodeKind.OUTPUT)


class Allocate(Protocol):
    """Allocates a result of a compiled graph."""

    def __call__(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor without data."""


class MemoryPlan:
    """The allocations and frees of a graph; `run` makes them on tensors without data."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._kinds = kinds_of(module.graph)
        self._inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        self._sources: dict[fx.Node, fx.Node] = {}
        self.steps = self._ordered(list(module.graph.nodes))
        self._held = self._held_results()
        self._last_uses = self._find_last_uses()
        output = self.steps[-1]
        self._outputs = {self._source(item) for item in output.all_input_nodes}
        self._viewers: dict[fx.Node, list[fx.Node]] = {}
        for node in self.steps:
            if self._kinds[node] in _PASSES_ON:
                self._viewers.setdefault(self._source(node), []).append(node)
        self._exists = {node for node in self.steps if self._has_memory(node)}

    def kernels(self) -> list[str]:
        """Return the names of the kernels that only CUDA has."""
        opaque = (node.target for node in self.steps if self._kinds[node] is NodeKind.OPAQUE)
        return [str(getattr(target, "__name__", target)).removesuffix("_backward") for target in opaque]

    def _source(self, node: fx.Node) -> fx.Node:
        """Return the node that holds the memory of a view or an item."""
        if node not in self._sources:
            source = node
            while self._kinds[source] in _PASSES_ON and source.all_input_nodes:
                source = source.all_input_nodes[0]
            self._sources[node] = source
        return self._sources[node]

    def _ordered(self, nodes: list[fx.Node]) -> list[fx.Node]:
        """Return the nodes in the order in which they run."""
        leaves = self._leaves(nodes)
        order = list(self._inputs)
        seen = set(order)
        output = nodes[-1]
        for root in nodes:
            is_root = self._kinds[root] in (NodeKind.LIBRARY, NodeKind.OPAQUE, NodeKind.WRITE) or root in leaves
            if root is output or not is_root:
                continue
            _append(root, order, seen)
        _append(output, order, seen)
        return order

    def _leaves(self, nodes: list[fx.Node]) -> set[fx.Node]:
        """Return the nodes whose value is an output, or a view of one."""
        leaves: set[fx.Node] = set()
        for node in reversed(nodes):
            if any(
                user.op == "output" or (user in leaves and self._kinds[user] is NodeKind.VIEW) for user in node.users
            ):
                leaves.add(node)
        return {node for node in leaves if self._kinds[node] is not NodeKind.INPUT}

    def _held_results(self) -> set[fx.Node]:
        """Return the loops whose results exist."""
        held = {node for node in self.steps if self._kinds[node] is NodeKind.REDUCTION}
        for node in self.steps:
            if self._kinds[node] in _CONSUMERS:
                held.update(
                    source
                    for source in map(self._source, node.all_input_nodes)
                    if self._kinds[source] is NodeKind.FUSED
                )
        return held

    def _has_memory(self, node: fx.Node) -> bool:
        source = self._source(node)
        return source in self._held or self._kinds[source] in _HAS_MEMORY

    def _find_last_uses(self) -> dict[fx.Node, list[fx.Node]]:
        """Return for each node what is read for the last time there, also through loops that are fused into it."""
        reads: dict[fx.Node, set[fx.Node]] = {}
        last: dict[fx.Node, fx.Node] = {}
        index = {node: place for place, node in enumerate(self.steps)}
        for node in self.steps:
            read: set[fx.Node] = set()
            for source in map(self._source, node.all_input_nodes):
                read |= {source} if self._has_memory(source) else reads.get(source, set())
            reads[node] = read
            kind = self._kinds[node]
            if kind in _CONSUMERS or kind is NodeKind.WRITE or node in self._held:
                last.update(dict.fromkeys(read, node))
        for node in self.steps:  # a view that is made after the last use of its base
            source = self._source(node)
            if source is not node and source in last and index[last[source]] < index[node]:
                last[source] = node
        for node in self.steps:  # an output of a kernel that nothing reads
            if self._kinds[node] in (NodeKind.LIBRARY, NodeKind.OPAQUE) or node in self._held:
                last.setdefault(node, node)
        ends: dict[fx.Node, list[fx.Node]] = {}
        for node, user in last.items():
            if any(True for _ in tensors_of(node.meta.get("val"))) or node.op == "get_attr":  # numbers stay
                ends.setdefault(user, []).append(node)
        return ends

    def run(self, allocate: Allocate, values: list[Any]) -> tuple[Any, ...]:
        """Run the plan on the inputs; the list is emptied, so that a saved tensor is freed after its last use."""
        return _Execution(self, values, allocate).run()


def _append(root: fx.Node, order: list[fx.Node], seen: set[fx.Node]) -> None:
    """Append a node after all that it needs."""
    stack = [root]
    while stack:
        node = stack[-1]
        missing = [] if node in seen else [item for item in node.all_input_nodes if item not in seen]
        if missing:
            stack += reversed(missing)
            continue
        stack.pop()
        if node not in seen:
            seen.add(node)
            order.append(node)


class _Execution:
    """One call of a compiled graph."""

    def __init__(self, plan: MemoryPlan, values: list[Any], allocate: Allocate) -> None:
        self._plan = plan
        self._allocate = allocate
        self._values = dict(zip(plan._inputs, values, strict=True))
        values.clear()
        self._symbols = self._given_symbols()

    def _given_symbols(self) -> dict[Any, Any]:
        """Return the numbers behind the symbols of dynamic shapes."""
        numbers: dict[Any, Any] = {}
        for node, value in self._values.items():
            symbol = node.meta.get("val")
            if isinstance(symbol, torch.SymInt):
                numbers[symbol.node.expr] = value
        return numbers

    def run(self) -> tuple[Any, ...]:
        plan, values = self._plan, self._values
        for node in plan.steps:
            kind = plan._kinds[node]
            if kind is NodeKind.OUTPUT:
                return tuple(self._arguments(node.args[0]))
            if kind is not NodeKind.INPUT:
                self._step(node, kind)
            for dead in plan._last_uses.get(node, ()):
                values.pop(dead, None)
                for viewer in plan._viewers.get(dead, ()):
                    values.pop(viewer, None)
        raise AssertionError("a graph without an output")

    def _step(self, node: fx.Node, kind: NodeKind) -> None:
        values, plan = self._values, self._plan
        if kind is NodeKind.CONSTANT:
            values[node] = getattr(plan._module, str(node.target))
        elif kind is NodeKind.SIZE:
            values[node] = self._number(node.meta["val"])
        elif kind in _PASSES_ON or kind is NodeKind.LIBRARY:
            if kind is NodeKind.LIBRARY or node in plan._exists:
                values[node] = _call(node, self._arguments)
        elif kind is NodeKind.OPAQUE or node in plan._held:
            values[node] = self._results(node, node.meta.get("val"))

    def _arguments(self, item: Any) -> Any:
        return fx.node.map_aggregate(item, lambda part: self._values[part] if isinstance(part, fx.Node) else part)

    def _number(self, value: Any) -> Any:
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            expression: Any = value.node.expr
            number = expression.xreplace(self._symbols) if hasattr(expression, "xreplace") else expression
            kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)]
            return kind(number)
        return value

    def _numbers(self, values: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(map(self._number, values))

    def _results(self, node: fx.Node, value: Any) -> Any:
        """Allocate the results of a loop, those that something reads."""
        if isinstance(value, Tensor):
            return self._result(node, value)
        if isinstance(value, dict):
            return {name: self._results(node, item) for name, item in value.items()}
        if isinstance(value, tuple | list):
            read = {user.args[1] for user in node.users if self._plan._kinds[user] is NodeKind.ITEM}
            return tuple(self._results(node, item) if place in read else None for place, item in enumerate(value))
        return self._number(value)

    def _result(self, node: fx.Node, value: Tensor) -> Tensor:
        size, stride = self._numbers(value.shape), self._numbers(value.stride())
        count = 1
        for length in size:
            count *= length
        old = self._reusable(node, value.dtype, count) if self._plan._kinds[node] is not NodeKind.OPAQUE else None
        if old is None:
            return self._allocate(size, stride, value.dtype)
        return _reinterpreted(old, size, stride)

    def _reusable(self, node: fx.Node, dtype: torch.dtype, count: int) -> Tensor | None:
        """Return a result of the same size that dies here (torch/_inductor/codegen/wrapper.py, memory_plan_reuse)."""
        plan = self._plan
        for dead in plan._last_uses.get(node, ()):
            old = self._values.get(dead)
            if dead in plan._outputs or plan._kinds[dead] is NodeKind.INPUT or not isinstance(old, Tensor):
                continue
            is_whole = old.untyped_storage().nbytes() == count * dtype.itemsize
            if old.dtype == dtype and old.numel() == count and is_whole:
                return old
        return None


def _call(node: fx.Node, arguments: Callable[[Any], Any]) -> Any:
    target: Any = node.target
    kwargs: dict[str, Any] = dict(node.kwargs)
    if isinstance(kwargs.get("device"), torch.device) and kwargs["device"].type == "cuda":
        kwargs["device"] = torch.device("meta")  # the device tensors of the virtual GPU are on meta
    return target(*arguments(node.args), **arguments(kwargs))


def _reinterpreted(tensor: Tensor, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    guards: Any = torch._C._dynamo.guards
    result: Tensor = guards._reinterpret_tensor(tensor, size, stride, 0)
    return result
