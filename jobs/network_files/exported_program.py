"""Reads the graph of a network that `torch.export.save` wrote: operations of ATen, with the shape of every value.

Only the JSON of the graph is read. Weights are skipped, and the example inputs are a pickle, which is never opened.
`tests/test_network_files.py` compares the fields with torch's own schema (torch/_export/serde/schema.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vramcast.errors import UserError
from vramcast.jobs.network_files.kept_tensors import VIEW
from vramcast.jobs.network_files.limits import (
    check_operations,
    checked_shape,
    list_of,
    mapping_of,
    shown,
    text_of,
)
from vramcast.jobs.network_files.table_builder import Operation, Parameter, Shape, TableBuilder, batch_of
from vramcast.jobs.spec import LayerTable

DTYPES: Mapping[int, str] = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32", 8: "float64", 12: "bool",
    13: "bfloat16",
}  # fmt: skip
"""ScalarType of the schema."""
_ATEN = "torch.ops.aten."
_VIEWS = frozenset(
    [
        "view",
        "_unsafe_view",
        "reshape",
        "flatten",
        "unflatten",
        "transpose",
        "permute",
        "t",
        "unsqueeze",
        "squeeze",
        "expand",
        "expand_as",
        "slice",
        "select",
        "split",
        "split_with_sizes",
        "chunk",
        "unbind",
        "narrow",
        "alias",
        "detach",
        "view_as",
        "swapaxes",
        "movedim",
        "numpy_T",
        "mT",
        "diagonal",
        "lift_fresh_copy",
        "lift_fresh",
        "unfold",
        "_assert_tensor_metadata",
    ]
)
_COPIES = frozenset(["clone", "contiguous", "to", "_to_copy", "type_as", "repeat", "pad", "constant_pad_nd"])
_CONVOLUTIONS = {f"{stem}{rank}d": f"{kind}{rank}d" for stem, kind in
                 (("conv", "Conv"), ("conv_transpose", "ConvTranspose")) for rank in (1, 2, 3)}  # fmt: skip
_KINDS = {**_CONVOLUTIONS, "linear": "Linear", "addmm": "Linear", "layer_norm": "LayerNorm", "group_norm": "GroupNorm",
          "batch_norm": "BatchNorm2d", "embedding": "Embedding", "rms_norm": "RMSNorm", "prelu": "PReLU",
          "lstm": "LSTM", "gru": "GRU"}  # fmt: skip
"""Layers of torch by the operation that has their parameters, for graphs without the names of modules."""
_KERNELS = ("kernel_size", "weight")


def is_exported_program(value: Any) -> bool:
    """Return whether a JSON value is the graph of an exported program."""
    return isinstance(value, Mapping) and "graph_module" in value


def read_exported_program(value: Any) -> LayerTable:
    """Return the layer table of the JSON in an archive of torch.export, in the order of the graph."""
    try:
        return _Graph.of(value).table()
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"expected a graph as torch.export writes it, found one without {shown(str(error))}: export it again"
        ) from error


@dataclass
class _Graph:
    nodes: list[Any]
    values: Mapping[str, Any]
    inputs: list[str]
    parameters: dict[str, Parameter]
    stacks: list[list[tuple[str, str]]]
    """The modules that each operation runs in, outermost first: path and class."""
    inner: set[str] = field(default_factory=set)
    """Modules that contain others that run, so that they are no layers."""

    @classmethod
    def of(cls, value: Any) -> "_Graph":
        module = mapping_of(mapping_of(value, "the program")["graph_module"], "graph_module")
        graph = mapping_of(module["graph"], "graph")
        nodes = list_of(graph["nodes"], "nodes")
        check_operations(len(nodes), "the graph")
        values = mapping_of(graph["tensor_values"], "tensor_values")
        inputs: list[str] = []
        parameters: dict[str, Parameter] = {}
        for item in list_of(mapping_of(module["signature"], "signature")["input_specs"], "input_specs"):
            kind, spec = next(iter(mapping_of(item, "an input").items()))
            if kind == "user_input" and "as_tensor" in spec["arg"]:
                inputs.append(spec["arg"]["as_tensor"]["name"])
            elif kind == "parameter":
                name = spec["arg"]["name"]
                parameters[name] = _parameter(text_of(spec["parameter_name"], "a parameter"), values[name])
        stacks = [_stack(mapping_of(node, "a node").get("metadata") or {}) for node in nodes]
        inner = {path for stack in stacks for path, _ in stack[:-1]}
        return cls(nodes, values, inputs, parameters, stacks, inner)

    def table(self) -> LayerTable:
        """Go through the operations in their order."""
        tensors = [name for name in self.inputs if name in self.values]
        if not tensors:
            raise UserError("expected a graph with a tensor as input, found none: export it with its inputs")
        batch = batch_of(_shape(self.values[tensors[0]], tensors[0]), tensors[0])
        builder = TableBuilder(batch)
        for name in tensors:
            builder.add_input(name, _shape(self.values[name], name), _dtype(self.values[name]))
        for node, stack in zip(self.nodes, self.stacks, strict=True):
            self._add(builder, node, stack)
        kinds = dict(pair for stack in self.stacks for pair in stack)
        return builder.finish(self.parameters.values(), kinds)

    def _add(self, builder: TableBuilder, node: Mapping[str, Any], stack: Sequence[tuple[str, str]]) -> None:
        target = text_of(node["target"], "an operation")
        outputs = [name for item in list_of(node["outputs"], "outputs") for name in _tensors_of(item)]
        if not outputs or not target.startswith(_ATEN):
            for name in outputs:  # a higher-order operation, or one of another library: it only passes data on
                self._add_other(builder, target, node, name)
            return
        name = target.removeprefix(_ATEN).partition(".")[0]
        plain = name.strip("_")
        arguments = {item["name"]: item["arg"] for item in list_of(node["inputs"], "inputs")}
        reads = [value for item in arguments.values() for value in _tensors_of(item)]
        own = [self.parameters[item] for item in reads if item in self.parameters]
        if outputs[0] not in self.values:
            return
        written = self.values[outputs[0]]
        path, kind = stack[-1] if stack else ("", "")
        is_layer = bool(stack) and path not in self.inner and path != ""
        if not stack and own and plain in _KINDS:
            path, kind, is_layer = own[0].name.rpartition(".")[0], _KINDS[plain], True
        in_place = name.endswith("_") and not name.startswith("_")
        moves = name in _VIEWS or name in _COPIES
        is_view = name in _VIEWS or (plain == "dropout" and arguments.get("p", {}).get("as_float") == 0)
        builder.add(
            Operation(
                name=path if stack else plain,
                kind=kind if is_layer else plain,
                formula=VIEW if moves or is_view else plain,
                reads=reads,
                writes=outputs[0],
                shape=_shape(written, outputs[0]),
                dtype=_dtype(written),
                module=is_layer,
                fresh=not is_view and not in_place,
                recorded=not is_view and not moves and not in_place,
                parameters=own if is_layer else (),
                window=_window(arguments, own, plain),
            )
        )
        for other in outputs[1:]:
            if other in self.values:
                builder.also_writes(other, outputs[0], _shape(self.values[other], other), fresh=not is_view)

    def _add_other(self, builder: TableBuilder, target: str, node: Mapping[str, Any], output: str) -> None:
        if output in self.values:
            kind = target.rpartition(".")[2] if target.count(".") < 2 else target.split(".")[-2]
            reads = [value for item in list_of(node["inputs"], "inputs") for value in _tensors_of(item["arg"])]
            shape, dtype = _shape(self.values[output], output), _dtype(self.values[output])
            builder.add(Operation(kind, kind, kind, reads, output, shape, dtype))


def _parameter(name: str, value: Mapping[str, Any]) -> Parameter:
    return Parameter(name, _shape(value, name), bool(value.get("requires_grad", True)), _dtype(value))


def _shape(value: Mapping[str, Any], name: str) -> Shape:
    """Return the sizes of a value; a symbol has that of the example which the network was exported with."""
    sizes = [_size(item) for item in list_of(mapping_of(value, name)["sizes"], "sizes")]
    return checked_shape(sizes, name)


def _size(item: Mapping[str, Any]) -> Any:
    if "as_int" in item:
        return item["as_int"]
    hint = item["as_expr"].get("hint") or {}
    if "as_int" not in hint:
        raise UserError("expected a size with an example, found a symbol alone: export the network with fixed sizes")
    return hint["as_int"]


def _dtype(value: Mapping[str, Any]) -> str:
    return DTYPES.get(value["dtype"], "float32")


_NO_ARGUMENT: tuple[str, Any] = ("", None)


def _tensors_of(argument: Any) -> Iterator[str]:
    """Yield the names of the tensors in an argument."""
    kind, value = next(iter(argument.items()), _NO_ARGUMENT) if isinstance(argument, Mapping) else _NO_ARGUMENT
    if kind == "as_tensor":
        yield value["name"]
    elif kind == "as_tensors":
        yield from (item["name"] for item in value)
    elif kind == "as_optional_tensor":
        yield from _tensors_of(value)
    elif kind == "as_optional_tensors":
        for item in value:
            yield from _tensors_of(item)


def _stack(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return paths and classes from 'key,path,class;...', as torch writes the modules around an operation."""
    text = metadata.get("nn_module_stack") if isinstance(metadata, Mapping) else None
    if not isinstance(text, str) or len(text) > 100_000:
        return []
    parts = [part.split(",") for part in text.split(";")]
    return [(part[1].partition("@")[0], part[2].rpartition(".")[2]) for part in parts if len(part) >= 3]


def _window(arguments: Mapping[str, Any], own: Sequence[Parameter], plain: str) -> dict[str, Any]:
    """Return kernel, stride and groups of a convolution or pooling."""
    window: dict[str, Any] = {}
    if plain in _CONVOLUTIONS and own and len(own[0].shape) > 2:
        window["kernel"] = own[0].shape[2:]
        groups = arguments.get("groups", {}).get("as_int", 1)
        window["groups"] = groups if isinstance(groups, int) and groups > 0 else 1
    elif "pool" in plain and (kernel := _sizes(arguments, "kernel_size")):
        window["kernel"] = kernel
    if "kernel" in window:
        window["stride"] = _sizes(arguments, "stride") or (
            window["kernel"] if "pool" in plain else (1,) * len(window["kernel"])
        )
    return window


def _sizes(arguments: Mapping[str, Any], name: str) -> Shape:
    value = arguments.get(name, {})
    sizes = value.get("as_ints") or ([value["as_int"]] if "as_int" in value else [])
    return checked_shape(sizes, name)
