"""Reads the header of a safetensors file: names and shapes of parameters, from which layers are inferred.

A header has no activations, so that two tables bracket the network: the expected one, and one whose layers are larger.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from vramcast.errors import UserError
from vramcast.jobs.network_files.description import NetworkDescription
from vramcast.jobs.network_files.limits import (
    FILE_BYTES,
    check_operations,
    checked_shape,
    mapping_of,
    parse_json,
    shown,
    text_of,
)
from vramcast.jobs.network_files.table_builder import Operation, Parameter, Shape, TableBuilder
from vramcast.jobs.spec import LayerTable

NOTE = (
    "read from names and shapes of parameters alone: activations are inferred from them, and the safe figure is that "
    "of a network with activations four times as large"
)
_LENGTH_BYTES = 8
_LARGER = 4
"""One halving of an image less, or the products inside an attention beside what its layers put out."""
_NARROW = 3
"""The widest first convolution that keeps the size of an image."""
_PATCH = 8
"""A first convolution at least this wide cuts an image into patches."""
_DTYPES: Mapping[str, str] = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "uint8", "F8_E5M2": "uint8",
}  # fmt: skip
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_BUFFERS = ("running_mean", "running_var", "position_ids", "inv_freq", "attn.bias", "attn.masked_bias", "total_params")
_EMBEDDING = re.compile(r"(embed|wte|wpe|tok|vocab|word)", re.IGNORECASE)
_FIRST = re.compile(r"(embed|stem|patch|wte|wpe|^conv_?1$|^conv_in|^bn1$)", re.IGNORECASE)
_BLOCK = re.compile(r"\.\d+(\.|$)")
_LAST = re.compile(r"(^|\.)(head|fc|classifier|lm_head|score|pooler)(\.|$)", re.IGNORECASE)
_POSITIONS = re.compile(r"(position|pos_emb|wpe|token_type)", re.IGNORECASE)


def header_length(head: bytes) -> int | None:
    """Return the length that a file states for its header, None if it is no safetensors file."""
    if len(head) <= _LENGTH_BYTES or head[_LENGTH_BYTES : _LENGTH_BYTES + 1] != b"{":
        return None
    return int.from_bytes(head[:_LENGTH_BYTES], "little")


def read_header(data: bytes, length: int, inputs: tuple[Shape, ...]) -> NetworkDescription:
    """Return the layers of a file, of which `data` is the beginning with the header."""
    if length > FILE_BYTES or len(data) < _LENGTH_BYTES + length:
        raise UserError(
            f"expected a safetensors header in the file, and of at most {FILE_BYTES >> 20} MiB, found one of {length}"
            " bytes: it is damaged or truncated"
        )
    header = mapping_of(parse_json(data[_LENGTH_BYTES : _LENGTH_BYTES + length], "the header"), "the header")
    tensors = {name: item for name, item in header.items() if name != "__metadata__"}
    check_operations(len(tensors), "the header")
    parameters = [item for name in sorted(tensors, key=_usual_order) if (item := _parameter(name, tensors[name]))]
    if len(inputs) != 1:
        raise UserError(
            "expected the shape of one input beside parameters alone, found none or several: give --input 512 for "
            "tokens or --input 3,224,224 for an image"
        )
    tables = [_table(parameters, inputs[0], larger) for larger in (1, _LARGER)]
    return NetworkDescription(tables[0], (NOTE,), widest=tables[1])


def _parameter(name: str, value: Any) -> Parameter | None:
    text_of(name, "the name of a parameter")
    item = mapping_of(value, name)
    shape, kind = checked_shape(item.get("shape"), name), item.get("dtype")
    if not isinstance(kind, str) or kind not in _DTYPES:
        raise UserError(f"expected the dtype of {shown(name)} as one of {sorted(_DTYPES)}, found {shown(kind)}: fix it")
    if name.endswith(_BUFFERS) or kind not in _FLOATS:
        return None
    return Parameter(name, shape, dtype=_DTYPES[kind])


def _usual_order(name: str) -> tuple[int, list[tuple[int, str]]]:
    """Return a key that sorts stems and embeddings first, block 2 before block 10, and heads last."""
    module = name.rpartition(".")[0]
    parts = re.split(r"(\d{1,9})", name)
    group = 0 if _FIRST.search(module) and not _BLOCK.search(module) else 2 if _LAST.search(module) else 1
    return group, [(int(part), "") if place % 2 else (-1, part) for place, part in enumerate(parts)]


def _table(parameters: list[Parameter], shape: Shape, larger: int) -> LayerTable:
    builder = TableBuilder(1)
    builder.add_input("", (1, *shape), "int64" if len(shape) == 1 else "float32")
    before = ""
    for place, operation in enumerate(_operations(parameters, shape)):
        name = str(place + 1)
        size = (*operation.shape[:1], operation.shape[1] * larger, *operation.shape[2:])
        builder.add(_named(operation, before, name, size))
        before = name
    return builder.finish(parameters)


def _named(operation: Operation, before: str, name: str, shape: Shape) -> Operation:
    return replace(operation, reads=(before,), writes=name, shape=shape)


def _operations(parameters: list[Parameter], shape: Shape) -> Iterator[Operation]:
    """Yield a layer for each module, in the order of names; an image is halved where channels grow."""
    modules: dict[str, list[Parameter]] = {}
    for item in parameters:
        modules.setdefault(item.name.rpartition(".")[0], []).append(item)
    side, channels, sequence = (shape[-1] if len(shape) == 3 else 0), 0, (shape[0] if len(shape) == 1 else 0)
    output: Shape = shape
    for name, own in modules.items():
        weight = max(own, key=lambda item: (len(item.shape), item.elements))
        rank = len(weight.shape)
        kind, formula = "Linear", "linear"
        if rank >= 3 and side:
            kind, formula = "Conv2d", "conv2d"
            kernel = weight.shape[-1]
            if not channels and kernel >= _PATCH:
                sequence, side = max((side // kernel) ** 2, 1), max(side // kernel, 1)
            elif weight.shape[0] >= 2 * channels and (channels or kernel > _NARROW):
                side = max(side // 2, 1)
            channels = max(channels, weight.shape[0])
            output = (weight.shape[0], side, side)
        elif rank == 2 and _EMBEDDING.search(name) and sequence:
            if _POSITIONS.search(name):
                continue
            kind, formula = "Embedding", "embedding"
            output = (sequence, weight.shape[1])
        elif rank == 2:
            output = (sequence, weight.shape[0]) if sequence else (weight.shape[0],)
        elif rank == 1:
            kind, formula = ("BatchNorm2d", "batch_norm") if side and not sequence else ("LayerNorm", "layer_norm")
            if weight.elements not in output:
                continue
        else:
            continue
        yield Operation(name, kind, formula, (), "", (1, *output), module=True, parameters=own)
        grows = kind == "Linear" and weight.shape[0] > weight.shape[1]
        if grows or kind == "BatchNorm2d":
            yield Operation(
                f"{name}.activation", "GELU" if grows else "ReLU", "gelu", (), "", (1, *output), module=True
            )
