"""Reads an ONNX file as a layer table: shapes are inferred by the onnx library, weights are never loaded."""

import ast
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from vramcast.errors import UserError
from vramcast.jobs.network_files.kept_tensors import VIEW
from vramcast.jobs.network_files.limits import check_operations, checked_shape, shown, text_of
from vramcast.jobs.network_files.onnx_attention import fused_attention
from vramcast.jobs.network_files.protobuf_weights import graph_without_weights
from vramcast.jobs.network_files.table_builder import FLOATS, Operation, Parameter, Shape, TableBuilder, batch_of
from vramcast.jobs.spec import LayerTable

FOLDED = (
    "an ONNX file whose convolutions have no normalisation beside them: an export for inference folds it away, and a "
    "training takes more; export it with training=TrainingMode.TRAINING and do_constant_folding=False"
)
_BATCH = 2
"""In place of a batch that the file leaves open."""
_DTYPES: Mapping[int, str] = {
    1: "float32", 2: "uint8", 3: "int8", 5: "int16", 6: "int32", 7: "int64", 9: "bool", 10: "float16", 11: "float64",
    16: "bfloat16",
}  # fmt: skip
"""TensorProto.DataType."""
_VIEWS = frozenset(
    [
        "Reshape",
        "Flatten",
        "Squeeze",
        "Unsqueeze",
        "Transpose",
        "Identity",
        "Slice",
        "Split",
        "Expand",
        "Shape",
        "Constant",
        "ConstantOfShape",
        "Range",
        "NonZero",
        "Size",
        "OneHot",
        "Cast",
        "Pad",
    ]
)
_RANKED = {"Conv": "Conv{}d", "ConvTranspose": "ConvTranspose{}d", "BatchNormalization": "BatchNorm{}d",
           "InstanceNormalization": "InstanceNorm{}d", "MaxPool": "MaxPool{}d", "AveragePool": "AvgPool{}d",
           "GlobalAveragePool": "AdaptiveAvgPool{}d", "GlobalMaxPool": "AdaptiveMaxPool{}d"}  # fmt: skip
_LAYERS = {
    **_RANKED, "Gemm": "Linear", "LayerNormalization": "LayerNorm", "GroupNormalization": "GroupNorm",
    "RMSNormalization": "RMSNorm", "SimplifiedLayerNormalization": "RMSNorm", "Relu": "ReLU", "LeakyRelu": "LeakyReLU",
    "PRelu": "PReLU", "Elu": "ELU", "Selu": "SELU", "Celu": "CELU", "Sigmoid": "Sigmoid", "Tanh": "Tanh",
    "HardSigmoid": "Hardsigmoid", "HardSwish": "Hardswish", "Gelu": "GELU", "Mish": "Mish", "Softplus": "Softplus",
    "Clip": "ReLU6", "Dropout": "Dropout", "LSTM": "LSTM", "GRU": "GRU", "RNN": "RNN",
}  # fmt: skip
"""Classes of torch.nn by the type of operation; the others are functions."""
_FORMULAS = {
    "Conv": "conv2d", "ConvTranspose": "conv_transpose2d", "BatchNormalization": "batch_norm",
    "InstanceNormalization": "instance_norm", "GroupNormalization": "group_norm", "MaxPool": "max_pool2d",
    "AveragePool": "avg_pool2d", "GlobalAveragePool": "adaptive_avg_pool2d", "GlobalMaxPool": "adaptive_max_pool2d",
    "Gemm": "linear", "LayerNormalization": "layer_norm", "RMSNormalization": "rms_norm", "Clip": "hardtanh",
    "SimplifiedLayerNormalization": "rms_norm", "LeakyRelu": "leaky_relu", "Concat": "cat", "LogSoftmax": "log_softmax",
    "ReduceMean": "mean", "ReduceSum": "sum", "Resize": "interpolate", "Upsample": "interpolate",
    "Attention": "scaled_dot_product_attention", "GatherElements": "gather", "MatMul": "matmul",
}  # fmt: skip
_REPEATED = ("Loop", "Scan")
_BUFFERS = {"BatchNormalization": (3, 4)}
"""Places of inputs that are no parameters: running means and variances."""


def read_onnx(source: Path | bytes, inputs: Sequence[Shape] = ()) -> tuple[LayerTable, tuple[str, ...]]:
    """Return the layer table and notes; `inputs` are shapes without the batch where the file leaves sizes open."""
    onnx = _library()
    cut = graph_without_weights(source)
    try:
        model = onnx.ModelProto.FromString(cut)
    except Exception as error:  # google.protobuf's DecodeError, from one of its several implementations
        raise UserError(f"expected a sound ONNX file, found: {shown(str(error))}; export it again") from error
    check_operations(len(model.graph.node), "the graph")
    if repeated := next((node.op_type for node in model.graph.node if node.op_type in _REPEATED), None):
        raise UserError(f"expected a graph that runs once, found {repeated}, whose steps are not known: unroll it")
    if model.functions:
        raise UserError(
            "expected an ONNX file without functions of its own, found some: inline them by "
            "onnx.inliner.inline_local_functions"
        )
    try:
        batch = _set_inputs(model.graph, inputs)
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    except UserError:
        raise
    except Exception as error:  # InferenceError, ValueError: the library names no common class
        raise UserError(f"expected shapes that fit together, found: {shown(str(error))}; export it again") from error
    try:
        graph = _Graph(inferred, batch)
        return graph.table(), (FOLDED,) if graph.is_folded else ()
    except (TypeError, AttributeError, IndexError, KeyError) as error:  # a name that is no text, an empty list
        raise UserError(f"expected a sound ONNX file, found: {shown(str(error))}; export it again") from error


def _library() -> Any:
    try:
        import_module("onnx.shape_inference")
        return import_module("onnx")
    except ImportError as error:
        raise UserError(
            "expected the library onnx to be installed, found none: pip install 'vramcast[onnx]'"
        ) from error


def _set_inputs(graph: Any, shapes: Sequence[Shape]) -> int:
    """Give every input fixed sizes, and return the batch."""
    weights = {item.name for item in graph.initializer}
    inputs = [item for item in graph.input if item.name not in weights]
    if not inputs:
        raise UserError("expected an ONNX file with an input, found none: export it again")
    if shapes and len(shapes) != len(inputs):
        raise UserError(
            f"expected an --input for each of the {len(inputs)} inputs of the file, found {len(shapes)}: give all, in "
            "their order"
        )
    batch = 0
    for place, item in enumerate(inputs):
        sizes = item.type.tensor_type.shape.dim
        if not sizes:
            raise UserError(f"expected the shape of the input {shown(item.name)}, found none: export it again")
        own = sizes[0].dim_value if sizes[0].HasField("dim_value") else _BATCH
        batch = batch or own
        if not sizes[0].HasField("dim_value"):
            sizes[0].dim_value = batch
        _set_sizes(item.name, sizes[1:], shapes[place] if shapes else None)
        batch_of(checked_shape([size.dim_value for size in sizes], item.name), item.name)
    return batch


def _set_sizes(name: str, sizes: Sequence[Any], shape: Shape | None) -> None:
    if shape is not None and len(shape) != len(sizes):
        raise UserError(f"expected {len(sizes)} sizes in the --input for {shown(name)}, found {list(shape)}: change it")
    for place, size in enumerate(sizes):
        if shape is not None:
            size.dim_value = shape[place]
        elif not size.HasField("dim_value"):
            raise UserError(
                f"expected fixed sizes of the input {shown(name)} behind the batch, found "
                f"{shown(size.dim_param or 'an open one')!r}: give --input SHAPE, without the batch"
            )


class _Graph:
    """An ONNX graph with the shapes of its values."""

    def __init__(self, graph: Any, batch: int) -> None:
        self._nodes = graph.node
        self._batch = batch
        self._weights = {item.name: item for item in graph.initializer}
        self._inputs = [item for item in graph.input if item.name not in self._weights]
        self._types = {item.name: item.type.tensor_type for item in (*graph.input, *graph.value_info, *graph.output)}
        self._parameters: dict[str, Parameter] = {}
        for item in graph.initializer:
            dtype = _DTYPES.get(item.data_type, "float32")
            shape = checked_shape(list(item.dims), item.name)
            if dtype in FLOATS and shape and shape != (1,):
                self._parameters[item.name] = Parameter(text_of(item.name, "a weight"), shape, dtype=dtype)
        for node in graph.node:
            for place in _BUFFERS.get(node.op_type, ()):
                if place < len(node.input):
                    self._parameters.pop(node.input[place], None)
        self._constants = self._found_constants()
        self._attention, self._fused_away = fused_attention(graph.node, self._constants)
        self._paths = [_path_of(node) for node in graph.node]
        self._inner = {parent for path, _ in self._paths for parent in _parents(path)}

    @property
    def is_folded(self) -> bool:
        """True if there are convolutions and no layer that normalises."""
        kinds = {node.op_type for node in self._nodes}
        return "Conv" in kinds and not any("Normalization" in kind for kind in kinds)

    def _found_constants(self) -> frozenset[str]:
        """Return the values that follow from no input and no parameter: shapes, scales, masks."""
        data = {item.name for item in self._inputs} | self._parameters.keys()
        constants: set[str] = set()
        for node in self._nodes:
            is_constant = node.op_type in ("Shape", "Size") or not any(name in data for name in node.input)
            (constants if is_constant else data).update(name for name in node.output if name)
        return frozenset(constants)

    def table(self) -> LayerTable:
        """Go through the operations in their order."""
        builder = TableBuilder(self._batch)
        for item in self._inputs:
            builder.add_input(item.name, self._shape(item.name) or (), self._dtype(item.name))
        products: set[str] = set()
        """Outputs of products with a weight, to which a bias may be added."""
        for node, (path, kind) in zip(self._nodes, self._paths, strict=True):
            self._add(builder, node, path, kind, products)
        return builder.finish(self._parameters.values())

    def _add(self, builder: TableBuilder, node: Any, path: str, kind: str, products: set[str]) -> None:
        output = next((name for name in node.output if name), None)
        if output is None:
            return
        if node.op_type == "Identity" and node.input and node.input[0] in self._parameters:
            same = self._parameters[node.input[0]]  # equal weights are stored once: each is a parameter of its own
            self._parameters[output] = Parameter(output, same.shape, dtype=same.dtype)
            return
        shape = self._shape(output)
        if shape is None and node.op_type in _LAYERS:
            raise UserError(
                f"expected the shape of {shown(output)}, found none: name sizes by --input, or export with fixed ones"
            )
        if shape is None or output in self._fused_away:
            builder.pass_on(output, node.input)
            return
        if self._dtype(output) not in FLOATS or output in self._constants:
            return
        own = [self._parameters[name] for name in node.input if name in self._parameters]
        operation = self._operation(node, path, kind, output, shape, own)
        biased = [name for name in node.input if name in products]
        if node.op_type == "Add" and own and biased and len(own[0].shape) == 1 and not operation.module:
            builder.merge(output, biased[0], own)
            return
        if node.op_type == "MatMul" and own:
            products.add(output)
        builder.add(operation)
        for other in node.output[1:]:
            if other and (second := self._shape(other)):
                builder.also_writes(other, output, second, fresh=node.op_type not in _VIEWS)

    def _operation(
        self, node: Any, path: str, kind: str, output: str, shape: Shape, own: Sequence[Parameter]
    ) -> Operation:
        name = node.op_type
        layer = _LAYERS.get(name) or (
            "Linear" if name == "MatMul" and own else "Embedding" if name == "Gather" and own else ""
        )
        layer = layer.format(max(len(shape) - 2, 1))
        is_leaf = path not in self._inner and path != ""
        owner = path if is_leaf else (own[0].name.rpartition(".")[0] if own else "") or node.name or output
        formula = (
            "linear"
            if layer == "Linear"
            else "embedding"
            if layer == "Embedding"
            else _FORMULAS.get(name, name.lower())
        )
        is_view = name in _VIEWS
        if attention := self._attention.get(output):
            layer, kind, formula = "", "scaled_dot_product_attention", "scaled_dot_product_attention"
        return Operation(
            name=text_of(owner, "the name of an operation") if layer or is_leaf else path,
            kind=layer or kind or name.lower(),
            formula=VIEW if is_view else formula,
            reads=attention or list(node.input),
            writes=output,
            shape=shape,
            dtype=self._dtype(output),
            module=bool(layer) or (is_leaf and bool(kind) and not attention),
            fresh=not is_view,
            recorded=not is_view,
            parameters=own if layer else (),
            window=_window(node) if layer else {},
        )

    def _shape(self, name: str) -> Shape | None:
        """Return the shape of a value, None if it is not known."""
        kind = self._types.get(name)
        if kind is None or not kind.HasField("shape"):
            return None
        sizes = [size.dim_value if size.HasField("dim_value") else None for size in kind.shape.dim]
        return None if None in sizes else checked_shape(sizes, name)

    def _dtype(self, name: str) -> str:
        kind = self._types.get(name)
        return _DTYPES.get(kind.elem_type, "float32") if kind is not None else "float32"


def _path_of(node: Any) -> tuple[str, str]:
    """Return the path of the module that an operation belongs to, and its class, as torch's exporters write them."""
    notes = {item.key: item.value for item in node.metadata_props}
    scopes = _texts(notes.get("pkg.torch.onnx.name_scopes"))
    if len(scopes) > 1:
        classes = _texts(notes.get("pkg.torch.onnx.class_hierarchy"))
        return scopes[-2], classes[-2].rpartition(".")[2] if len(classes) == len(scopes) else ""
    parts = node.name.split("/")  # /layer1/layer1.0/conv1/Conv
    return ("/".join(parts[1:-1]), "") if len(parts) > 2 and not parts[0] else ("", "")


def _texts(text: str | None) -> list[str]:
    try:
        values = ast.literal_eval(text) if text and len(text) < 10_000 else []
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    return values if isinstance(values, list) and all(isinstance(item, str) for item in values) else []


def _parents(path: str) -> set[str]:
    """Return the modules around a module, in the notations of both exporters."""
    for separator in ("/", "."):
        if separator in path:
            parts = path.split(separator)
            return {separator.join(parts[:end]) for end in range(1, min(len(parts), 50))}
    return set()


def _window(node: Any) -> dict[str, Any]:
    """Return kernel, stride and groups of a convolution or pooling."""
    attributes = {item.name: item for item in node.attribute if item.name in ("kernel_shape", "strides", "group")}
    if "kernel_shape" not in attributes:
        return {}
    kernel = checked_shape(list(attributes["kernel_shape"].ints), "a kernel")
    stride = (
        checked_shape(list(attributes["strides"].ints), "a stride") if "strides" in attributes else (1,) * len(kernel)
    )
    groups = {"groups": max(attributes["group"].i, 1)} if "group" in attributes else {}
    return {"kernel": kernel, "stride": stride, **groups}
