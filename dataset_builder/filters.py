"""The filter: says of a spec whether its training can run, without building a tensor.

It walks the plan with the shape specification; the layer table of what it accepts falls out on the way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from typing import Any

from vramcast.dataset_builder import expressions
from vramcast.dataset_builder.analysis.optimizers import DEMANDS, OPTIMIZERS, REFUSED, OptimizerRule
from vramcast.dataset_builder.families import plan_of
from vramcast.dataset_builder.plan import Node, Plan
from vramcast.dataset_builder.schema import LayerRecord, LayerTable, Spec
from vramcast.dataset_builder.specification import SPECIFICATION, TRAINING_RULES
from vramcast.errors import UserError
from vramcast.virtual_gpu.training_setup import TrainingSetup, parse_call

Shape = tuple[int, ...]
_CONTENT = {True: "tokens", False: "numbers"}


@dataclass(frozen=True)
class Tensor:
    """The shape of a value that flows through the plan, batch first."""

    shape: Shape
    tokens: bool = False


@dataclass(frozen=True)
class Rejected:
    """A configuration that cannot run, and why."""

    reason: str


class Violation(Exception):  # noqa: N818 - it ends a walk and never leaves this module
    """A condition that does not hold."""


@lru_cache(maxsize=256)  # the pipeline asks, and then the backend that runs in the same process
def check(spec: Spec) -> LayerTable | Rejected:
    """Accept a spec with the table of its layers, or reject it with the reason."""
    plan = plan_of(spec)
    try:
        _check_training(spec.training, plan)
        # What a large batch may do a small one may not (a norm needs more than one value), never the reverse.
        return _Walk(min(spec.training.batch_sizes)).run(plan)
    except Violation as violation:
        return Rejected(str(violation))


def _check_training(training: TrainingSetup, plan: Plan) -> None:
    name, arguments = parse_call(training.optimizer)
    rule = OPTIMIZERS.get(name)
    values = {
        **vars(training),
        "optimizer": name,
        "optimizers": sorted(OPTIMIZERS),
        "refused": REFUSED,
        "refused_because": REFUSED.get(name),
        "arguments": dict(arguments),
        "known_arguments": sorted(rule.arguments) if rule else [],
        "unknown_arguments": sorted(arguments.keys() - rule.arguments) if rule else [],
        "broken_demands": _broken_demands(rule, arguments) if rule else [],
        "implementations": rule.implementations if rule else (),
        "last_layer": _last(plan.root).kind,
    }
    scope = expressions.scope(values)
    for item in TRAINING_RULES:
        if not expressions.evaluate(item.condition, scope):
            raise Violation(item.reason.format(**values))


def _last(node: Node) -> Node:
    while node.children:
        node = node.children[-1]
    return node


def _broken_demands(rule: OptimizerRule, arguments: Mapping[str, Any]) -> list[str]:
    """What the optimizer's constructor would refuse of the arguments that are given."""
    scope = expressions.scope(
        {"momentum": 0, "dampening": 0, **arguments}, {"is_float": lambda x: isinstance(x, float)}
    )
    demands = {**DEMANDS, **rule.demands}
    return [demands[key] for key in arguments if key in demands and not _is_met(demands[key], scope)]


def _is_met(demand: str, scope: dict[str, Any]) -> bool:
    try:
        return bool(expressions.evaluate(demand, scope))
    except UserError:  # a word where a number should be
        return False


class _Walk:
    """Carries shapes through a plan and records the layers on the way."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.layers: list[LayerRecord] = []
        self.shapes: list[Shape] = []

    def run(self, plan: Plan) -> LayerTable:
        inputs = [Tensor((self.batch_size, *item.shape), item.vocabulary is not None) for item in plan.inputs]
        if plan.root.kind == "EncoderDecoder":
            self._encoder_decoder(plan.root, inputs[0], inputs[1])
        else:
            self.node(plan.root, inputs[0], "")
        return LayerTable(tuple(self.layers), tuple(self.shapes), sum(prod(item.shape) for item in plan.inputs))

    def node(self, node: Node, x: Tensor, name: str) -> Tensor:
        """The output of a node: a composite is walked, a layer is looked up."""
        composite = _COMPOSITES.get(node.kind)
        return composite(self, node, x, name) if composite else self.layer(node.kind, node.args, x, name)

    def layer(self, kind: str, args: Mapping[str, Any], x: Tensor, name: str, functional: bool = False) -> Tensor:
        """Apply one process of the specification and record it."""
        process = SPECIFICATION.get(kind)
        if process is None:
            raise Violation(f"{kind} at {name!r}: the specification has no such layer, it has {sorted(SPECIFICATION)}")
        if x.tokens != process.tokens:
            raise Violation(f"{kind} at {name!r}: expected {_CONTENT[process.tokens]}, found {_CONTENT[x.tokens]}")
        known, demanded = _arguments(kind)
        if args.keys() - known or demanded - args.keys():
            raise Violation(f"{kind} at {name!r}: expected the arguments {sorted(known)}, found {sorted(args)}")
        dims = _bind(process.reads, x.shape)
        if dims is None:
            raise Violation(f"{kind} at {name!r}: expected an input of shape ({process.reads}), found {x.shape}")
        scope = expressions.scope({**process.defaults, **args, **dims}, _FUNCTIONS)
        _hold(process.pre, scope, kind, name)
        for key, text in process.let.items():
            scope[key] = expressions.evaluate(text, scope)
        _hold(process.post, scope, kind, name)
        out = tuple(expressions.evaluate(process.writes, scope))
        shapes = expressions.evaluate(process.parameters, scope)
        shared = expressions.evaluate(process.shares, scope)
        self._record(process.shown_as or kind, name, out, shapes, bool(shared), functional)
        return Tensor(out)

    def _record(
        self, kind: str, name: str, out: Shape, shapes: Sequence[Shape], shared: bool, functional: bool
    ) -> None:
        self.shapes.extend(shapes)
        elements = prod(out) // self.batch_size
        parameters = sum(prod(shape) for shape in shapes)
        self.layers.append(LayerRecord(name, kind, out[1:], 0 if shared else elements, parameters, functional))

    def operation(self, kind: str, x: Tensor, name: str, **args: Any) -> Tensor:
        """A function that no layer owns."""
        return self.layer(kind, args, x, name, functional=True)

    def chain(self, node: Node, x: Tensor, name: str) -> Tensor:
        for index, child in enumerate(node.children):
            x = self.node(child, x, _join(name, index))
        return x

    def residual(self, node: Node, x: Tensor, name: str) -> Tensor:
        parts = [("body", node.children[0]), ("shortcut", node.children[1])]
        if node.args.get("shortcut_first"):
            parts.reverse()
        first, second = (self.node(part, x, _join(name, title)) for title, part in parts)
        return self.operation("add", first, name, other=second.shape)

    def dense(self, node: Node, x: Tensor, name: str) -> Tensor:
        features = [x]
        for index, child in enumerate(node.children):
            joined = self._cat(features, name)
            features.append(self.node(child, joined, f"{_join(name, 'layers')}.{index}"))
        return self._cat(features, name)

    def _cat(self, features: list[Tensor], name: str) -> Tensor:
        return self.operation("cat", features[0], name, others=[item.shape for item in features[1:]])

    def causal_attention(self, node: Node, x: Tensor, name: str) -> Tensor:
        size, heads = node.args["size"], node.args["heads"]
        if size % heads:
            raise Violation(
                f"CausalSelfAttention at {name!r}: expected size % heads == 0, found size={size}, heads={heads}"
            )
        x = self.layer("Linear", {"in_features": size, "out_features": 3 * size}, x, _join(name, "qkv"))
        out = self.operation("scaled_dot_product_attention", x, name, num_heads=heads)
        joined = Tensor((out.shape[0], out.shape[2], out.shape[1] * out.shape[3]))
        return self.layer("Linear", {"in_features": size, "out_features": size}, joined, _join(name, "projection"))

    def torch_layer(self, node: Node, x: Tensor, name: str, memory: Tensor | None = None) -> Tensor:
        """nn.TransformerEncoderLayer, or with a memory nn.TransformerDecoderLayer."""
        args = node.args
        attention = {"embed_dim": args["d_model"], "num_heads": args["nhead"]}
        steps: list[Callable[[Tensor], Tensor]] = [
            lambda y: self.layer("MultiheadAttention", attention, y, _join(name, "self_attn")),
            lambda y: self._feed_forward(args, y, name),
        ]
        if memory is not None:
            cross = {**attention, "memory": memory.shape}
            steps.insert(1, lambda y: self.layer("CrossAttention", cross, y, _join(name, "multihead_attn")))
        for index, step in enumerate(steps, 1):
            x = self._in_residual(step, x, args, name, index)
        return x

    def _in_residual(
        self, step: Callable[[Tensor], Tensor], x: Tensor, args: Mapping[str, Any], name: str, index: int
    ) -> Tensor:
        def norm(y: Tensor) -> Tensor:
            return self.layer("LayerNorm", {"normalized_shape": args["d_model"]}, y, _join(name, f"norm{index}"))

        def body(y: Tensor) -> Tensor:
            return self.layer("Dropout", {"p": args["dropout"]}, step(y), _join(name, f"dropout{index}"))

        if args["norm_first"]:
            return self.operation("add", body(norm(x)), name, other=x.shape)
        return norm(self.operation("add", body(x), name, other=x.shape))

    def _feed_forward(self, args: Mapping[str, Any], x: Tensor, name: str) -> Tensor:
        size, wide = args["d_model"], args["dim_feedforward"]
        x = self.layer("Linear", {"in_features": size, "out_features": wide}, x, _join(name, "linear1"))
        kind = args["activation"]
        if isinstance(kind, Node):
            x = self.layer(kind.kind, kind.args, x, _join(name, "activation"))
        else:
            x = self.operation(kind, x, name)
        x = self.layer("Dropout", {"p": args["dropout"]}, x, _join(name, "dropout"))
        return self.layer("Linear", {"in_features": wide, "out_features": size}, x, _join(name, "linear2"))

    def _encoder_decoder(self, node: Node, source: Tensor, target: Tensor) -> Tensor:
        source_chain, target_chain, layers, head = node.children
        memory = self.node(source_chain, source, "source")
        x = self.node(target_chain, target, "target")
        for index, child in enumerate(layers.children):
            x = self.torch_layer(child, x, f"layers.{index}", memory)
        return self.node(head, x, "head")


_COMPOSITES: Mapping[str, Callable[[_Walk, Node, Tensor, str], Tensor]] = {
    "Sequential": _Walk.chain,
    "CheckpointedSequential": _Walk.chain,
    "Encoder": _Walk.chain,
    "Residual": _Walk.residual,
    "DenseBlock": _Walk.dense,
    "CausalSelfAttention": _Walk.causal_attention,
    "TransformerEncoderLayer": _Walk.torch_layer,
}


def _join(name: str, part: str | int) -> str:
    return f"{name}.{part}" if name else str(part)


@cache
def _arguments(kind: str) -> tuple[frozenset[str], frozenset[str]]:
    """The arguments that a process knows, and those that it cannot do without."""
    process = SPECIFICATION[kind]
    texts = (*process.pre, *process.let.values(), *process.post, process.writes, process.parameters, process.shares)
    dims = {item.lstrip("*") for item in process.reads.split(", ")}
    read = frozenset().union(*map(expressions.names, texts)) - dims - process.let.keys() - _FUNCTIONS.keys()
    return read | process.defaults.keys(), read - process.defaults.keys()


def _hold(conditions: Sequence[str], scope: dict[str, Any], kind: str, name: str) -> None:
    for condition in conditions:
        if not expressions.evaluate(condition, scope):
            found = ", ".join(f"{key}={scope[key]}" for key in sorted(expressions.names(condition)) if key in scope)
            raise Violation(f"{kind} at {name!r}: expected {condition}, found {found}")


@cache
def _names(reads: str) -> tuple[tuple[str, ...], int | None]:
    """The names of an input's dimensions, and which of them has the star."""
    names = reads.split(", ")
    starred = next((i for i, item in enumerate(names) if item.startswith("*")), None)
    return tuple(item.removeprefix("*") for item in names), starred


def _bind(reads: str, shape: Shape) -> dict[str, Any] | None:
    """Give the dimensions their names; None where their number does not fit."""
    names, starred = _names(reads)
    if starred is None:
        return dict(zip(names, shape, strict=True)) if len(names) == len(shape) else None
    rest = len(shape) - len(names) + 1  # how many dimensions the star takes
    if rest < 0:
        return None
    values = (*shape[:starred], shape[starred : starred + rest], *shape[starred + rest :])
    return dict(zip(names, values, strict=True))


def _broadcast(a: Shape, b: Shape) -> Shape:
    longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
    padded = (1,) * (len(longer) - len(shorter)) + shorter
    return tuple(y if x == 1 else x for x, y in zip(longer, padded, strict=True))


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "broadcast": _broadcast,
    "sum_of_channels": lambda shapes: sum(shape[1] for shape in shapes),
}
