"""Read layer tables from JSON or from the output of torchinfo and torchsummary, for networks without code to run."""

import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from vramcast.errors import UserError, check_count
from vramcast.jobs.network_files.limits import checked_shape, shown
from vramcast.jobs.spec import NETWORK_INPUT, LayerRecord, LayerTable

_FLOAT_BYTES = 4
_MEGABYTE = {"torchsummary": 2**20, "torchinfo": 10**6}
"""Bytes of a MB in each (torchsummary.py: / (1024 ** 2.); torchinfo/model_statistics.py: / 1e6)."""
_SHAPE = re.compile(r"\[([-\d, ]*)\]")
_SUMMARY_ROW = re.compile(r"^\s*([\w.]+)-(\d+)\s+(\[.*\])\s+([\d,]+)\s*$")
_INFO_ROW = re.compile(r"^[│├└─\s]*([\w.]+)(?: \(.*?\))?: (\d+)-(\d+)\s{2,}(.*)$")
_GAP = re.compile(r"\s{2,}")
_TOTAL = re.compile(r"^(Total|Trainable) params:\s*([\d,]+)", re.MULTILINE)
_INPUT = re.compile(r"^Input size \(MB\):\s*([\d.]+)", re.MULTILINE)
_PASSES = re.compile(r"^Forward/backward pass size \(MB\):\s*([\d.]+)", re.MULTILINE)
_LONGEST_TEXT = 4 << 20
_MOST_ELEMENTS = 2**50
_ROUNDING_MB = 0.005
_MOST_HIDDEN = 0.1
"""Share of the activations that may lie below the depth that torchinfo printed."""


def read_table(value: Any) -> LayerTable:
    """Return the layer table in the contents of a file."""
    if not isinstance(value, str):
        return _parse_json(value)
    if len(value) > _LONGEST_TEXT:
        raise UserError(f"expected a summary of at most {_LONGEST_TEXT} characters, found {len(value)}: name another")
    try:
        return _checked(_parse_text(value))
    except (ValueError, OverflowError, IndexError) as error:  # a number of thousands of digits, a row that is cut off
        if isinstance(error, UserError):
            raise
        raise UserError(f"expected the text of torchinfo or torchsummary, found: {error}; print it again") from error


def _checked(table: LayerTable) -> LayerTable:
    """Return a table whose sizes a device could hold."""
    for layer in table.layers:
        checked_shape(layer.output_shape, layer.kind)
        check_count(f"the parameters of {shown(layer.name)}", layer.parameters, least=0, most=_MOST_ELEMENTS)
    check_count("the elements of the input", table.input_elements, least=0, most=_MOST_ELEMENTS)
    return table


def _parse_json(value: Any) -> LayerTable:
    """Read layers with kind, output shape without the batch, and parameters."""
    values = {"layers": value} if isinstance(value, list) else value
    if not isinstance(values, Mapping) or not isinstance(values.get("layers"), list) or not values["layers"]:
        raise UserError("expected a layer table with 'layers', or a spec, found neither: see docs/classify.md")
    layers = tuple(_layer(item, index) for index, item in enumerate(values["layers"]))
    shapes = values.get("trainable_shapes") or [[layer.parameters] for layer in layers if layer.parameters]
    if not isinstance(shapes, list) or not all(map(_is_shape, shapes)):
        raise UserError(f"expected trainable_shapes as lists of whole numbers, found {shown(shapes)}: change them")
    elements: Any = values.get("input_elements")
    if elements is None:
        raise UserError("expected 'input_elements', those of one sample, in a layer table, found none: add it")
    check_count("input_elements", elements, most=_MOST_ELEMENTS)
    return LayerTable(layers, tuple(map(tuple, shapes)), elements)


def _is_shape(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(size, int) and 0 < size <= _MOST_ELEMENTS for size in value
    )


def _layer(item: Any, index: int) -> LayerRecord:
    if not isinstance(item, Mapping) or "kind" not in item:
        raise UserError(f"expected a layer with its 'kind', found {shown(item)} at place {index}: add it")
    shape, parameters = item.get("output_shape", []), item.get("parameters", 0)
    if not _is_shape(shape):
        raise UserError(f"expected the output_shape of layer {index} as whole numbers, found {shown(shape)}: change it")
    check_count(f"the parameters of layer {index}", parameters, least=0, most=_MOST_ELEMENTS)
    activations = item.get("activations", prod(shape) if shape else 0)
    check_count(f"the activations of layer {index}", activations, least=0, most=_MOST_ELEMENTS)
    functional = bool(item.get("functional", False))
    return LayerRecord(
        str(item.get("name", index)), str(item["kind"]), tuple(shape), activations, parameters, functional,
        **_details(item, index),
    )  # fmt: skip


_COUNTS = ("trainable", "parameter_bytes", "groups", "saved", "saved_fixed_bytes")


def _details(item: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return the fields of a layer that only some sources know."""
    details = {
        name: item[name] for name in (*_COUNTS, "kernel", "stride", "inputs", "dtype") if item.get(name) is not None
    }
    for name in details.keys() & set(_COUNTS):
        check_count(f"{name} of layer {index}", details[name], least=0, most=_MOST_ELEMENTS)
    for name in details.keys() & {"kernel", "stride"}:
        if not _is_shape(details[name]):
            raise UserError(
                f"expected the {name} of layer {index} as whole numbers, found {shown(details[name])}: change it"
            )
        details[name] = tuple(details[name])
    if "inputs" in details:
        details["inputs"] = _inputs(details["inputs"], index)
    return details if "dtype" not in details else {**details, "dtype": str(details["dtype"])}


def _inputs(places: Any, index: int) -> tuple[int, ...]:
    earlier = range(NETWORK_INPUT, index)
    if not isinstance(places, list | tuple) or not all(isinstance(at, int) and at in earlier for at in places):
        raise UserError(
            f"expected the inputs of layer {index} as places of earlier layers, or {NETWORK_INPUT} for the network's "
            f"input, found {shown(places)}: change them"
        )
    return tuple(sorted(set(places)))


def _parse_text(text: str) -> LayerTable:
    source = "torchinfo" if "depth-idx" in text else "torchsummary"
    batch = _batch_of(text) if source == "torchinfo" else 1
    layers = tuple(_info_layers(text, batch) if source == "torchinfo" else _summary_layers(text))
    if not layers:
        raise UserError("expected the text of torchinfo or torchsummary, found no rows of one: print it again")
    totals = {name: int(number.replace(",", "")) for name, number in _TOTAL.findall(text)}
    frozen = "Trainable" in totals and totals["Trainable"] < totals.get("Total", 0)
    shapes = [(totals["Trainable"],)] if frozen else [(layer.parameters,) for layer in layers if layer.parameters]
    size = _INPUT.search(text)
    elements = round(float(size[1]) * _MEGABYTE[source] / _FLOAT_BYTES / batch) if size else 0
    return LayerTable(layers, tuple(shapes), elements)


def _sizes(text: str) -> tuple[int, ...]:
    match = _SHAPE.search(text)
    return tuple(int(item) for item in match[1].split(",") if item.strip()) if match else ()


def _number(text: str) -> int:
    """Parse a parameter count, in brackets if frozen; '--' and '(recursive)' count as none."""
    match = re.match(r"\(?([\d,]+)", text.strip())
    return int(match[1].replace(",", "")) if match else 0


def _summary_layers(text: str) -> Iterator[LayerRecord]:
    """Yield the leaves: torchsummary also lists containers, which repeat the output of their last child."""
    rows = [row for line in text.splitlines() if (row := _SUMMARY_ROW.match(line))]
    for kind, index, shape, parameters in (row.groups() for row in rows):
        sizes, own = _sizes(shape)[1:], _number(parameters)
        leaf = own > 0 or kind in _LEAF_LAYERS or kind.endswith(_LAYER_ENDINGS)
        if leaf:
            yield LayerRecord(f"{kind}-{index}", kind, sizes, prod(sizes), own)


_LEAF_LAYERS = frozenset({"ReLU", "ReLU6", "GELU", "SiLU", "Mish", "ELU", "SELU", "Tanh", "Sigmoid", "Softmax",
                           "LeakyReLU", "Hardswish", "Hardsigmoid", "Softplus", "Upsample", "Identity"})  # fmt: skip
_LAYER_ENDINGS = ("Dropout", "Dropout2d", "Pool1d", "Pool2d", "Pool3d", "Norm", "Norm1d", "Norm2d", "Flatten")


def _info_layers(text: str, batch: int) -> Iterator[LayerRecord]:
    """Yield the leaves of the tree that torchinfo prints."""
    columns, rows = _info_rows(text)
    shape, parameters = columns.index("Output Shape"), columns.index("Param #")
    depths = [int(row[2]) for row, _ in rows]
    shown = 0
    for (row, cells), depth, following in zip(rows, depths, [*depths[1:], 0], strict=True):
        if following <= depth:
            sizes = _sizes(cells[shape])[1:]
            elements = prod(sizes) if sizes else 0
            shown += elements if cells[parameters] != "--" else 0
            yield LayerRecord(f"{row[1]}-{row[2]}-{row[3]}", row[1], sizes, elements, _number(cells[parameters]))
    if rows:
        yield from _hidden_layers(text, batch, shown)


def _info_rows(text: str) -> tuple[list[str], list[tuple[re.Match[str], list[str]]]]:
    """Return the columns, which users choose, and the rows of the tree with a cell for each."""
    header = next(line for line in text.splitlines() if "depth-idx" in line)
    columns = _GAP.split(header.strip())[1:]
    if not {"Output Shape", "Param #"} <= set(columns):
        raise UserError(f"expected the columns 'Output Shape' and 'Param #' of torchinfo, found {columns}: print both")
    rows = [(row, _GAP.split(row[4].strip())) for line in text.splitlines() if (row := _INFO_ROW.match(line))]
    for row, cells in rows:
        if len(cells) != len(columns):
            raise UserError(f"expected {len(columns)} figures to a layer, found {row[0].strip()!r}: print it again")
    return columns, rows


def _hidden_layers(text: str, batch: int, shown: int) -> Iterator[LayerRecord]:
    """Yield a record for the activations below the printed depth.

    torchinfo's sum counts the outputs of all layers with parameters twice (torchinfo/model_statistics.py,
    total_output_bytes).
    """
    size = _PASSES.search(text)
    least = max(float(size[1]) - _ROUNDING_MB, 0.0) if size else 0.0
    counted = int(least * _MEGABYTE["torchinfo"] / _FLOAT_BYTES / 2 / batch)
    hidden = counted - shown
    if hidden > _MOST_HIDDEN * counted:
        raise UserError(
            f"expected all layers of the network, found activations of {counted} elements a sample of which the rows "
            f"show {shown}: print the summary with depth=100"
        )
    if hidden > 0:
        yield LayerRecord("hidden", "Hidden", (hidden,), hidden, 0)


def _batch_of(text: str) -> int:
    """Return the batch size, which is the first size of the first shape."""
    sizes = _sizes(text)
    return sizes[0] if sizes and sizes[0] > 0 else 1
