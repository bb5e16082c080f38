"""Reads a file that describes a network, by its content: the suffix of its name decides nothing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vramcast.errors import UserError
from vramcast.jobs.layer_tables import read_table
from vramcast.jobs.network_files.archives import Archive
from vramcast.jobs.network_files.description import NetworkDescription
from vramcast.jobs.network_files.exported_program import is_exported_program, read_exported_program
from vramcast.jobs.network_files.keras_graph import is_keras_network, read_keras
from vramcast.jobs.network_files.limits import FILE_BYTES, check_operations, parse_json, shown
from vramcast.jobs.network_files.onnx_graph import read_onnx
from vramcast.jobs.network_files.protobuf_weights import looks_like_onnx
from vramcast.jobs.network_files.safetensors_header import header_length, read_header
from vramcast.jobs.network_files.table_builder import Shape
from vramcast.jobs.network_files.transformers_config import check_config, is_transformers_config

FILE_FORMS = (
    "an ONNX file, an archive of torch.export, the JSON of a Keras network, a config.json of transformers, the text of "
    "torchinfo or torchsummary, a safetensors file, or a layer table"
)
_HEAD_BYTES = 4096
_OTHERS: Mapping[bytes, str] = {
    b"\x89HDF": "a file of HDF5: write the network's to_json() into a file, and name that",
    b"\x80": "a pickle, which is never opened because it may hold code: save the network by torch.export",
    b"GGUF": "a GGUF file: name the config.json of the network it was made of",
    b"\x1f\x8b": "a compressed file: unpack it first",
    b"TFL3": "a file of TensorFlow Lite: name the Keras network it was made of",
}
_NO_INPUT = "expected no --input beside a file that states its shapes, found one: leave it out"

Contents = NetworkDescription | Mapping[str, Any]
"""A network, or a mapping for others: a spec, or a configuration of transformers."""


def read_network_file(path: Path, inputs: tuple[Shape, ...] = ()) -> Contents:
    """Return what a file describes."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
            length = header_length(head)
            if length is not None:
                return read_header(head + file.read(min(max(length - _HEAD_BYTES + 8, 0), FILE_BYTES)), length, inputs)
        if head.startswith(b"PK\x03\x04"):
            return _read_archive(path, inputs)
        if looks_like_onnx(head):
            return _described(read_onnx(path, inputs))
        _check_known(head)
        if size > FILE_BYTES:
            raise UserError(f"expected {FILE_FORMS}, found {size >> 20} MiB of something else: name another file")
        return read_text(path.read_bytes(), inputs)
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"expected a file that describes a network at {shown(str(path))}, found: {error}; check the path"
        ) from error


def read_network_bytes(data: bytes, inputs: tuple[Shape, ...] = ()) -> Contents:
    """Return what the content of a file describes, for requests: archives are not among them."""
    length = header_length(data)
    if length is not None:
        return read_header(data, length, inputs)
    if looks_like_onnx(data):
        return _described(read_onnx(data, inputs))
    if data.startswith(b"PK\x03\x04"):
        raise UserError(
            "expected the JSON inside of an archive, found the archive: send models/model.json or config.json"
        )
    _check_known(data)
    return read_text(data, inputs)


def read_text(data: bytes, inputs: tuple[Shape, ...]) -> Contents:
    """Return what JSON or a summary describes."""
    if data.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] not in (b"{", b"["):
        _refuse_inputs(inputs)
        return _checked(read_table(_decoded(data)))
    return read_network_value(parse_json(data, "the file"), inputs)


def read_network_value(value: Any, inputs: tuple[Shape, ...]) -> Contents:
    """Return what a value of JSON or YAML describes."""
    if is_exported_program(value):
        _refuse_inputs(inputs)
        return NetworkDescription(read_exported_program(value))
    if is_keras_network(value):
        return NetworkDescription(read_keras(value, inputs))
    if is_transformers_config(value):
        check_config(value)
        return dict(value)
    _refuse_inputs(inputs)
    if isinstance(value, dict) and {"family", "network", "training"} <= value.keys():
        return value
    return _checked(read_table(value))


def _read_archive(path: Path, inputs: tuple[Shape, ...]) -> Contents:
    with Archive(path) as archive:
        if name := archive.find(lambda item: item.endswith("models/model.json")):
            _refuse_inputs(inputs)
            return NetworkDescription(read_exported_program(parse_json(archive.read(name), "the graph")))
        if name := archive.find(lambda item: item == "serialized_exported_program.json"):  # before torch 2.8
            _refuse_inputs(inputs)
            return NetworkDescription(read_exported_program(parse_json(archive.read(name), "the graph")))
        if name := archive.find(lambda item: item == "config.json"):  # a .keras file
            return NetworkDescription(read_keras(parse_json(archive.read(name), "config.json"), inputs))
        if archive.find(lambda item: item.endswith("data.pkl")):
            raise UserError(
                "expected an archive of torch.export or Keras, found weights of torch.save, which are a pickle and "
                "hold no graph: save the network by torch.export"
            )
    raise UserError("expected an archive of torch.export or Keras, found neither: name another file")


def _checked(table: Any) -> NetworkDescription:
    check_operations(len(table.layers), "the table")
    return NetworkDescription(table)


def _described(read: tuple[Any, tuple[str, ...]]) -> NetworkDescription:
    return NetworkDescription(*read)


def _refuse_inputs(inputs: tuple[Shape, ...]) -> None:
    if inputs:
        raise UserError(_NO_INPUT)


def _check_known(head: bytes) -> None:
    for start, what in _OTHERS.items():
        if head.startswith(start):
            raise UserError(f"expected {FILE_FORMS}, found {what}; or name another file")


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"expected {FILE_FORMS}, found bytes of something else: name another file") from error
