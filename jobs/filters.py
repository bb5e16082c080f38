"""The filter: decides whether the training of a spec can run, without building a tensor.

It walks the plan with the shape specification, and records the layer table on the way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from typing import Any

from vramcast.errors import UserError
from vramcast.jobs import expressions
from vramcast.jobs.analysis.optimizers import DEMANDS, OPTIMIZERS, REFUSED, OptimizerRule
from vramcast.jobs.families import plan_of
from vramcast.jobs.plan import Node, Plan
from vramcast.jobs.shape_rules import SPECIFICATION, TRAINING_RULES
from vramcast.jobs.spec import LayerRecord, LayerTable, Spec
from vramcast.virtual_gpu.training.setup import TrainingSetup, parse_call

Shape = tuple[int, ...]
_CONTENT = {True: "tokens", False: "numbers"}


@dataclass(frozen=True)
class TensorShape:
    """The shape of a tensor in the plan, batch first."""

    shape: Shape
    tokens: bool = False


@dataclass(frozen=True)
class Rejected:
    """The verdict on a configuration that cannot run."""

    reason: str


class Violation(Exception):  # noqa: N818 - control flow that never leaves this module
    """A condition that does not hold."""


@lru_cache(maxsize=256)  # the pipeline checks a spec before the backend does, often in the same process
def check(spec: Spec) -> LayerTable | Rejected:
    """Return the layer table of a spec that can run, or the reason why it cannot."""
    plan = plan_of(spec)
    try:
        _check_training(spec.training, plan)
        # If the smallest batch can run, so can larger ones: a norm needs more than one value.
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
    """Return the conditions of the optimizer's constructor that the arguments do not meet."""
    scope = expressions.scope(
        {"momentum": 0, "dampening": 0, **arguments}, {"is_float": lambda x: isinstance(x, float)}
    )
    demands = {**DEMANDS, **rule.demands}
    return [demands[key] for key in arguments if key in demands and not _is_met(demands[key], scope)]


def _is_met(demand: str, scope: dict[str, Any]) -> bool:
    try:
        return bool(expressions.evaluate(demand, scope))
    except UserError:  # such as a string in place of a number
        return False


class _Walk:
    """Computes the shapes in a plan and records its layers."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.layers: list[LayerRecord] = []
        self.shapes: list[Shape] = []

    def run(self, plan: Plan) -> LayerTable:
        inputs = [TensorShape((self.batch_size, *item.shape), item.vocabulary is not None) for item in plan.inputs]
        if plan.root.kind == "EncoderDecoder":
            self._encoder_decoder(plan.root, inputs[0], inputs[1])
        else:
            self.node(plan.root, inputs[0], "")
        return LayerTable(tuple(self.layers), tuple(self.shapes), sum(prod(item.shape) for item in plan.inputs))

    def node(self, node: Node, x: TensorShape, name: str) -> TensorShape:
        """Return the output of a node: walk a composite, or look up a layer."""
        composite = _COMPOSITES.get(node.kind)
        return composite(self, node, x, name) if composite else self.layer(node.kind, node.args, x, name)

    def layer(
        self, kind: str, args: Mapping[str, Any], x: TensorShape, name: str, functional: bool = False
    ) -> TensorShape:
        """Apply one process of the specification and record it."""
        process = SPECIFICATION.get(kind)
        if process is None:
            raise Violation(f"{kind} at {name!r}: expected a layer of {sorted(SPECIFICATION)}, found {kind}")
        if x.tokens != process.tokens:
            raise Violation(f"{kind} at {name!r}: expected {_CONTENT[process.tokens]}, found {_CONTENT[x.tokens]}")
        allowed, required = _arguments(kind)
        if args.keys() - allowed or required - args.keys():
            raise Violation(f"{kind} at {name!r}: expected the arguments {sorted(allowed)}, found {sorted(args)}")
        dims = _bind(process.reads, x.shape)
        if dims is None:
            raise Violation(f"{kind} at {name!r}: expected an input of shape ({process.reads}), found {x.shape}")
        scope = expressions.scope({**process.defaults, **args, **dims}, _FUNCTIONS)
        _check_conditions(process.pre, scope, kind, name)
        for key, text in process.let.items():
            scope[key] = expressions.evaluate(text, scope)
        _check_conditions(process.post, scope, kind, name)
        out = tuple(expressions.evaluate(process.writes, scope))
        shapes = expressions.evaluate(process.parameters, scope)
        shared = expressions.evaluate(process.shares, scope)
        self._record(process.shown_as or kind, name, out, shapes, bool(shared), functional)
        return TensorShape(out)

    def _record(
        self, kind: str, name: str, out: Shape, shapes: Sequence[Shape], shared: bool, functional: bool
    ) -> None:
        self.shapes.extend(shapes)
        elements = prod(out) // self.batch_size
        parameters = sum(prod(shape) for shape in shapes)
        self.layers.append(LayerRecord(name, kind, out[1:], 0 if shared else elements, parameters, functional))

    def operation(self, kind: str, x: TensorShape, name: str, **args: Any) -> TensorShape:
        """Apply a function outside of any layer, and record it."""
        return self.layer(kind, args, x, name, functional=True)

    def chain(self, node: Node, x: TensorShape, name: str) -> TensorShape:
        for index, child in enumerate(node.children):
            x = self.node(child, x, _join(name, index))
        return x

    def residual(self, node: Node, x: TensorShape, name: str) -> TensorShape:
        parts = [("body", node.children[0]), ("shortcut", node.children[1])]
        if node.args.get("shortcut_first"):
            parts.reverse()
        first, second = (self.node(part, x, _join(name, title)) for title, part in parts)
        return self.operation("add", first, name, other=second.shape)

    def dense(self, node: Node, x: TensorShape, name: str) -> TensorShape:
        features = [x]
        for index, child in enumerate(node.children):
            joined = self._cat(features, name)
            features.append(self.node(child, joined, f"{_join(name, 'layers')}.{index}"))
        return self._cat(features, name)

    def _cat(self, features: list[TensorShape], name: str) -> TensorShape:
        return self.operation("cat", features[0], name, others=[item.shape for item in features[1:]])

    def causal_attention(self, node: Node, x: TensorShape, name: str) -> TensorShape:
        size, heads = node.args["size"], node.args["heads"]
        if size % heads:
            raise Violation(
                f"CausalSelfAttention at {name!r}: expected size % heads == 0, found size={size}, heads={heads}"
            )
        x = self.layer("Linear", {"in_features": size, "out_features": 3 * size}, x, _join(name, "qkv"))
        out = self.operation("scaled_dot_product_attention", x, name, num_heads=heads)
        joined = TensorShape((out.shape[0], out.shape[2], out.shape[1] * out.shape[3]))
        return self.layer("Linear", {"in_features": size, "out_features": size}, joined, _join(name, "projection"))

    def torch_layer(self, node: Node, x: TensorShape, name: str, memory: TensorShape | None = None) -> TensorShape:
        """Walk an nn.TransformerEncoderLayer, or with a memory an nn.TransformerDecoderLayer."""
        args = node.args
        attention = {"embed_dim": args["d_model"], "num_heads": args["nhead"]}
        steps: list[Callable[[TensorShape], TensorShape]] = [
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
        self, step: Callable[[TensorShape], TensorShape], x: TensorShape, args: Mapping[str, Any], name: str, index: int
    ) -> TensorShape:
        def norm(y: TensorShape) -> TensorShape:
            return self.layer("LayerNorm", {"normalized_shape": args["d_model"]}, y, _join(name, f"norm{index}"))

        def body(y: TensorShape) -> TensorShape:
            return self.layer("Dropout", {"p": args["dropout"]}, step(y), _join(name, f"dropout{index}"))

        if args["norm_first"]:
            return self.operation("add", body(norm(x)), name, other=x.shape)
        return norm(self.operation("add", body(x), name, other=x.shape))

    def _feed_forward(self, args: Mapping[str, Any], x: TensorShape, name: str) -> TensorShape:
        size, wide = args["d_model"], args["dim_feedforward"]
        x = self.layer("Linear", {"in_features": size, "out_features": wide}, x, _join(name, "linear1"))
        kind = args["activation"]
        if isinstance(kind, Node):
            x = self.layer(kind.kind, kind.args, x, _join(name, "activation"))
        else:
            x = self.operation(kind, x, name)
        x = self.layer("Dropout", {"p": args["dropout"]}, x, _join(name, "dropout"))
        return self.layer("Linear", {"in_features": wide, "out_features": size}, x, _join(name, "linear2"))

    def _encoder_decoder(self, node: Node, source: TensorShape, target: TensorShape) -> TensorShape:
        source_chain, target_chain, layers, head = node.children
        memory = self.node(source_chain, source, "source")
        x = self.node(target_chain, target, "target")
        for index, child in enumerate(layers.children):
            x = self.torch_layer(child, x, f"layers.{index}", memory)
        return self.node(head, x, "head")


_COMPOSITES: Mapping[str, Callable[[_Walk, Node, TensorShape, str], TensorShape]] = {
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
    """Return the arguments that a process accepts, and those that it requires."""
    process = SPECIFICATION[kind]
    texts = (*process.pre, *process.let.values(), *process.post, process.writes, process.parameters, process.shares)
    dims = {item.lstrip("*") for item in process.reads.split(", ")}
    read = frozenset().union(*map(expressions.names, texts)) - dims - process.let.keys() - _FUNCTIONS.keys()
    return read | process.defaults.keys(), read - process.defaults.keys()


def _check_conditions(conditions: Sequence[str], scope: dict[str, Any], kind: str, name: str) -> None:
    for condition in conditions:
        if not expressions.evaluate(condition, scope):
            values = ", ".join(f"{key}={scope[key]}" for key in sorted(expressions.names(condition)) if key in scope)
            raise Violation(f"{kind} at {name!r}: expected {condition}, found {values}")


@cache
def _names(reads: str) -> tuple[tuple[str, ...], int | None]:
    """Return the names of an input's dimensions, and the index of the starred one."""
    names = reads.split(", ")
    starred = next((i for i, item in enumerate(names) if item.startswith("*")), None)
    return tuple(item.removeprefix("*") for item in names), starred


def _bind(reads: str, shape: Shape) -> dict[str, Any] | None:
    """Return the dimensions by name, or None if their number does not fit."""
    names, starred = _names(reads)
    if starred is None:
        return dict(zip(names, shape, strict=True)) if len(names) == len(shape) else None
    rest = len(shape) - len(names) + 1  # the number of dimensions of the starred name
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
