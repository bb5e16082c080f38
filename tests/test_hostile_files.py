"""Files from strangers end in one sentence: damaged, circular, deep, huge, or made to be unpacked without an end."""

import io
import json
import random
import resource
import struct
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from network_files import (
    config_value,
    exported_program,
    forms,
    graph_json,
    keras_value,
    onnx_file,
    safetensors_file,
    written,
)

from vramcast.errors import UserError
from vramcast.jobs.network_files import limits
from vramcast.jobs.network_files.description import NetworkDescription
from vramcast.jobs.network_files.reading import read_network_bytes, read_network_file

_INPUTS = {"small.safetensors": ((3, 16, 16),)}
_MUTATIONS = 120
"""Of each form: 840 files in all."""


def mutated(content: bytes, draw: random.Random) -> bytes:
    """Damage a file in one of the ways that transfers, editors and attackers do."""
    data = bytearray(content)
    place = draw.randrange(len(data))
    way = draw.randrange(6)
    if way == 0:
        del data[place:]
    elif way == 1:
        for _ in range(draw.choice((1, 3, 20))):
            data[draw.randrange(len(data))] = draw.randrange(256)
    elif way == 2:
        data[place:place] = draw.randbytes(draw.choice((1, 8, 200)))
    elif way == 3:
        del data[place : place + draw.choice((1, 8, 200))]
    elif way == 4:
        numbers = [at for at in range(len(data)) if chr(data[at]).isdigit()]
        if numbers:
            at = draw.choice(numbers)
            data[at : at + 1] = draw.choice((b"-1", b"0", b"99999999999999999999", b"1e400", b"null", b'"a"', b"[]"))
    else:
        part = data[place : place + draw.choice((4, 40, 400))]
        data[draw.randrange(len(data)) :] = part * draw.choice((1, 50))
    return bytes(data)


@pytest.mark.parametrize("name", sorted(forms()))
def test_damaged_files_are_read_or_refused_in_one_sentence(tmp_path: Path, name: str) -> None:
    if name.endswith(".onnx"):
        pytest.importorskip("onnx")
    draw, content, refused = random.Random(name), forms()[name], 0
    for _ in range(_MUTATIONS):
        path = written(tmp_path, "file", mutated(content, draw))
        try:
            found = read_network_file(path, _INPUTS.get(name, ()))
        except UserError as error:
            refused += 1
            assert str(error).startswith("expected ")
            assert "\n" not in str(error)
            assert len(str(error)) < 600, error
        else:
            assert found
    assert refused > _MUTATIONS / 10


def refusal(content: bytes, *inputs: tuple[int, ...]) -> str:
    """Return the sentence that refuses a content, which takes less than two seconds and little memory."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(UserError) as caught:
        read_network_bytes(content, inputs)
    assert time.process_time() - start < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 2**10
    return str(caught.value)


def changed_graph(change: Any) -> bytes:
    value = json.loads(graph_json())
    change(value["graph_module"]["graph"])
    return json.dumps(value).encode()


@pytest.mark.parametrize("size", [-1, 2**41, 10**30, "3", None, 1.5])
def test_impossible_sizes_are_refused(size: Any) -> None:
    def change(graph: Any) -> None:
        graph["tensor_values"]["conv2d"]["sizes"][1] = {"as_int": size}

    assert "in the shape of conv2d" in refusal(changed_graph(change))


def test_products_of_sizes_are_bounded() -> None:
    def change(graph: Any) -> None:
        graph["tensor_values"]["conv2d"]["sizes"] = [{"as_int": 2**20}] * 4

    assert "at most 2**50 elements" in refusal(changed_graph(change))


def test_a_graph_with_a_billion_layers_is_refused_by_what_it_declares() -> None:
    def change(graph: Any) -> None:
        graph["nodes"] = [{}] * 20_001

    assert "expected 1 to 20000 operations" in refusal(changed_graph(change))
    repeated = {"class_name": "Sequential", "config": {"layers": [{"class_name": "ReLU", "config": {}}] * 20_001}}
    assert "expected 1 to 20000 operations" in refusal(json.dumps(repeated).encode())
    header = json.dumps({f"a{index}": {"dtype": "F32", "shape": [1]} for index in range(20_001)}).encode()
    assert "expected 1 to 20000 operations" in refusal(struct.pack("<Q", len(header)) + header, (3, 8, 8))
    table = {"input_elements": 1, "layers": [{"kind": "ReLU", "output_shape": [1]}] * 20_001}
    assert "expected 1 to 20000 operations" in refusal(json.dumps(table).encode())


def test_circles_are_refused() -> None:
    value = keras_value()
    conv = next(item for item in value["config"]["layers"] if item["name"] == "conv")
    conv["inbound_nodes"][0]["args"][0]["config"]["keras_history"] = ["add", 0, 0]
    assert "in a circle or without inputs" in refusal(json.dumps(value).encode())


def test_a_circle_in_onnx_is_refused() -> None:
    onnx = pytest.importorskip("onnx")
    model = onnx.ModelProto.FromString(onnx_file())
    model.graph.node[0].input[0] = "e"
    assert refusal(model.SerializeToString()).startswith("expected")


@pytest.mark.parametrize("deep", [b"[" * 100_000, b'{"class_name":' * 100_000, b'{"a":[' * 50_000])
def test_deep_nesting_is_refused(deep: bytes) -> None:
    assert refusal(deep).startswith("expected JSON in the file")


def test_networks_inside_of_each_other_are_bounded() -> None:
    value = keras_value()
    for _ in range(50):
        value = {"class_name": "Sequential", "name": "a", "config": {"name": "a", "layers": [value]}}
    assert "at most 8 networks inside of each other" in refusal(json.dumps(value).encode())
    config: dict[str, Any] = config_value()
    for _ in range(50):
        config = {**config_value(), "text_config": config}
    assert "at most 8 levels" in refusal(json.dumps(config).encode())


def test_headers_and_messages_that_declare_more_than_the_file_has_are_refused(tmp_path: Path) -> None:
    huge = struct.pack("<Q", 10 * 2**30) + b'{"a": 1}'
    assert "found one of 10737418240 bytes" in refusal(huge)
    with pytest.raises(UserError, match="found one of 10737418240 bytes"):
        read_network_file(written(tmp_path, "huge", huge))
    onnx = pytest.importorskip("onnx")
    assert onnx
    assert "ends behind its message" in refusal(b"\x08\x09\x3a\xff\xff\xff\xff\x0f" + bytes(20))


def test_archives_that_unpack_without_an_end_are_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/models/model.json", b" " * (limits.FILE_BYTES + 100))
    path = written(tmp_path, "bomb", buffer.getvalue())
    assert path.stat().st_size < 10**6
    with pytest.raises(UserError, match="unpack to at most 64 MiB, found more"):
        read_network_file(path)


def test_an_archive_that_lists_too_many_members_is_refused_before_they_are_read(tmp_path: Path) -> None:
    end = b"PK\x05\x06" + struct.pack("<4H2LH", 0, 0, 65535, 65535, 2**31, 4, 0)
    with pytest.raises(UserError, match="a list of members of 2147483648 bytes"):
        read_network_file(written(tmp_path, "members", b"PK\x03\x04" + bytes(100) + end))


def test_a_member_that_lies_about_its_size_is_refused(tmp_path: Path) -> None:
    content = exported_program()
    start = content.rindex(b"model.json") - 46
    assert start > 0
    at = content.find(b"models/model.json")
    broken = content[:at] + content[at + 9 :]
    with pytest.raises(UserError, match="expected"):
        read_network_file(written(tmp_path, "lies", broken))


def test_names_from_a_file_reach_no_terminal_as_they_are() -> None:
    header = safetensors_file(**{"\x1b[31mred\n" + "x" * 500: {"dtype": "F99", "shape": [1]}})
    sentence = refusal(header, (3, 8, 8))
    assert "\x1b" not in sentence
    assert len(sentence) < 300


def test_code_in_a_file_is_never_found_by_its_name() -> None:
    value = keras_value()
    value["config"]["layers"][3] = {
        **value["config"]["layers"][3], "class_name": "Lambda", "module": "os", "registered_name": "system",
    }  # fmt: skip
    assert "found Lambda: holds code" in refusal(json.dumps(value).encode())


def test_sound_files_are_read_after_all_that() -> None:
    for name, content in forms().items():
        if not name.endswith(".pt2"):
            if name.endswith(".onnx"):
                pytest.importorskip("onnx")
            assert isinstance(read_network_bytes(content, _INPUTS.get(name, ())), NetworkDescription | dict)


@pytest.mark.parametrize(
    "layer",
    [
        {"kind": "Linear", "output_shape": [10**400]},
        {"kind": "Linear", "output_shape": [5], "activations": 10**400},
        {"kind": "Linear", "output_shape": [5], "parameters": 2**60},
        {"kind": "Linear", "output_shape": [-5]},
        {"kind": "Linear", "output_shape": ["x" * 10_000]},
        {"output_shape": [5], "name": "x" * 10_000},
    ],
)
def test_layers_of_impossible_sizes_are_refused_in_a_short_sentence(layer: dict[str, Any]) -> None:
    sentence = refusal(json.dumps({"input_elements": 1, "layers": [layer]}).encode())
    assert sentence.startswith("expected ")
    assert len(sentence) < 600


def test_values_nested_in_a_graph_are_refused() -> None:
    def change(graph: Any) -> None:
        argument: Any = {"as_none": True}
        for _ in range(400):
            argument = {"as_optional_tensor": argument}
        graph["nodes"][0]["inputs"][0]["arg"] = argument

    try:
        assert isinstance(read_network_bytes(changed_graph(change)), NetworkDescription)
    except UserError as error:
        assert str(error).startswith("expected")


@pytest.mark.parametrize(
    ("before", "after"), [("2,565", "9" * 30), ("[-1, 5]", "[-1, -5]"), ("[-1, 5]", f"[-1, {10**30}]")]
)
def test_summaries_of_impossible_sizes_are_refused(before: str, after: str) -> None:
    assert refusal(forms()["summary.txt"].decode().replace(before, after).encode()).startswith("expected ")
