"""Networks from files without code: the tables of all forms agree with what a run of the same module records."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from network_files import (
    CHANNELS,
    FIXTURES,
    SIDE,
    config_value,
    exported_program,
    graph_json,
    keras_value,
    onnx_file,
    safetensors_file,
    small_network,
    written,
)

from vramcast.child.messages import DONE
from vramcast.cli import main
from vramcast.commands.classify.simulators import described
from vramcast.errors import UserError
from vramcast.jobs.analysis.layers import detailed_table
from vramcast.jobs.building import build_job
from vramcast.jobs.network_files.description import NetworkDescription
from vramcast.jobs.network_files.exported_program import DTYPES
from vramcast.jobs.network_files.keras_graph import read_keras
from vramcast.jobs.network_files.reading import read_network_bytes, read_network_file
from vramcast.jobs.spec import LayerTable
from vramcast.jobs.targets import BuildRequest, Target, parse_target
from vramcast.simulation.sandbox.child import _Service
from vramcast.simulation.simulator import Simulator
from vramcast.virtual_gpu.training.setup import TrainingSetup


@pytest.fixture(scope="module")
def recorded() -> LayerTable:
    """Return the table of the module itself."""
    return detailed_table(small_network().to("meta"), [torch.empty(2, 3, SIDE, SIDE, device="meta")])


def table_in(path: Path, *inputs: tuple[int, ...]) -> LayerTable:
    found = read_network_file(path, inputs)
    assert isinstance(found, NetworkDescription)
    return found.table


def rows(table: LayerTable) -> list[tuple[Any, ...]]:
    """Return what all sources know of the layers that are no views."""
    return [
        (layer.kind, layer.output_shape, layer.activations, layer.parameters, layer.saved_fixed_bytes)
        for layer in table.layers
        if layer.activations
    ]


def saved(table: LayerTable) -> int:
    return sum(layer.saved or 0 for layer in table.layers)


def test_an_exported_program_has_the_table_of_its_module(tmp_path: Path, recorded: LayerTable) -> None:
    for name, content in (("program", exported_program()), ("model.json", graph_json())):  # without a suffix, and alone
        table = table_in(written(tmp_path, name, content))
        assert rows(table) == rows(recorded)
        assert [layer.name for layer in table.layers] == [layer.name for layer in recorded.layers]
        assert [layer.inputs for layer in table.layers] == [layer.inputs for layer in recorded.layers]
        assert table.trainable_shapes == recorded.trainable_shapes
        assert table.input_elements == recorded.input_elements
        assert saved(table) == pytest.approx(saved(recorded), rel=0.01)  # without the statistics of a batch


def test_the_fields_of_an_exported_program_are_those_of_torchs_schema() -> None:
    """The reader needs no torch; torch's own classes must find what it reads."""
    from torch._export.serde.schema import ExportedProgram, ScalarType
    from torch._export.serde.serialize import _dict_to_dataclass

    program = _dict_to_dataclass(ExportedProgram, json.loads(graph_json()))
    table = read_network_bytes(graph_json())
    assert isinstance(table, NetworkDescription)
    operators = [node.target for node in program.graph_module.graph.nodes]
    assert "torch.ops.aten.conv2d.default" in operators
    named = {
        item.value.parameter_name for item in program.graph_module.signature.input_specs if item.type == "parameter"
    }
    assert len(named) == len(table.table.trainable_shapes) == 7
    names = {value: str(getattr(torch, name)).removeprefix("torch.") for value, name in (
        (item.value, {"BYTE": "uint8", "CHAR": "int8", "SHORT": "int16", "INT": "int32", "LONG": "int64",
                      "HALF": "float16", "FLOAT": "float32", "DOUBLE": "float64", "BOOL": "bool",
                      "BFLOAT16": "bfloat16"}[item.name]) for item in ScalarType if item.value in DTYPES)}  # fmt: skip
    assert names == dict(DTYPES)


def test_an_onnx_file_has_the_table_of_its_module(tmp_path: Path, recorded: LayerTable) -> None:
    pytest.importorskip("onnx")
    table = table_in(written(tmp_path, "network.bin", onnx_file()))
    assert rows(table) == rows(recorded)
    assert sorted(table.trainable_shapes) == sorted(recorded.trainable_shapes)
    assert [layer.inputs for layer in table.layers if layer.kind in ("add", "Conv2d", "Linear")] == [
        layer.inputs for layer in recorded.layers if layer.kind in ("add", "Conv2d", "Linear")
    ]
    assert saved(table) == pytest.approx(saved(recorded), rel=0.01)


def test_an_onnx_file_with_open_sizes_needs_an_input_and_takes_one(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    model = onnx.ModelProto.FromString(onnx_file())
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "height"
    path = written(tmp_path, "open.onnx", model.SerializeToString())
    with pytest.raises(UserError, match="expected fixed sizes of the input x behind the batch, found 'height': give"):
        read_network_file(path)
    assert table_in(path, (3, SIDE, SIDE)).layers[0].output_shape == (CHANNELS, SIDE, SIDE)


def test_weights_of_an_onnx_file_are_cut_out_before_it_is_parsed(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    from vramcast.jobs.network_files.protobuf_weights import graph_without_weights

    cut = onnx.ModelProto.FromString(graph_without_weights(onnx_file()))
    whole = onnx.ModelProto.FromString(onnx_file())
    large = next(item for item in cut.graph.initializer if item.name == "fc.weight")
    assert not large.raw_data
    assert list(large.dims) == [5, CHANNELS * 64]
    assert [item.name for item in cut.graph.initializer] == [item.name for item in whole.graph.initializer]
    assert cut.graph.node == whole.graph.node


def test_a_keras_network_has_the_table_of_the_same_module(tmp_path: Path, recorded: LayerTable) -> None:
    path = written(tmp_path, "network", json.dumps(keras_value()).encode())
    table = table_in(path)
    found = [row for row in rows(table) if row[0] != "Dropout"]
    assert found == [row for row in rows(recorded) if row[0] != "Dropout"]
    assert sorted(map(len, table.trainable_shapes)) == sorted(map(len, recorded.trainable_shapes))
    assert saved(table) == pytest.approx(saved(recorded), rel=0.01)


KERAS_LAYERS = json.loads((FIXTURES / "keras_layers.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "recorded", KERAS_LAYERS, ids=lambda item: item["network"]["config"]["layers"][-1]["class_name"]
)
def test_layers_of_keras_have_the_sizes_that_keras_gives_them(recorded: dict[str, Any]) -> None:
    table = read_keras(recorded["network"])
    assert table.parameters == table.trainable_elements == recorded["parameters"]
    assert sorted(table.layers[-1].output_shape) == sorted(recorded["output_shape"])


def test_a_network_of_keras_without_sizes_takes_them_from_the_input() -> None:
    value = keras_value()
    value["config"]["layers"][0]["config"]["batch_shape"] = [None, None, None, 3]
    with pytest.raises(UserError, match="expected an input of known sizes"):
        read_keras(value)
    assert read_keras(value, ((SIDE, SIDE, 3),)) == read_keras(keras_value())


def test_a_command_answers_for_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(written(tmp_path, "program", exported_program()))
    assert main(["classify", path, "--batch-size", "64", "--optimizer", "sgd", "--json", "--max-batch"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["checkpoint"], answer["verdict"], answer["reserved_mib"]) == ("universal_layers", "fits", None)
    assert answer["max_batch_size"] > 1000
    for words, message in (
        (["--input", "3,16,16"], "expected no --input beside a file that states its shapes"),
        (["--optimizer", "paged_adamw_8bit"], "beside layers alone, found"),
        (["--channels-last"], "expected no channels_last"),
        (["--strategies", "--json"], "expected no strategies beside layers alone"),
    ):
        assert main(["classify", path, "--batch-size", "64", *words]) == 2
        assert message in capsys.readouterr().err


def test_a_network_of_code_is_described_after_one_forward_pass(
    tmp_path: Path, recorded: LayerTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    source = (Path(__file__).parent / "support" / "network_files.py").read_text(encoding="utf-8")
    path = written(tmp_path, "net.py", source.encode())
    request = BuildRequest(target=parse_target(f"{path}:small_network"), inputs=(f"3,{SIDE},{SIDE}",))
    child = _Service("allowed")  # the child process without its process
    assert child.answer({"do": "build", "request": request.to_json()})[0]["event"] == DONE
    options = {"batch_size": 32, "optimizer": "sgd", "dtype": "bf16"}
    answer, _ = child.answer({"do": "describe", "options": options})
    network = NetworkDescription.from_json(json.loads(json.dumps(answer["description"])))
    assert rows(network.table) == rows(recorded)
    assert saved(network.table) == saved(recorded)
    assert network.training == TrainingSetup(batch_size=32, optimizer="SGD", dtype="bf16")
    assert network.family == "module"


def test_a_config_of_transformers_is_built_by_the_library(tmp_path: Path) -> None:
    path = written(tmp_path, "config.json", json.dumps(config_value()).encode())
    found = described(str(path))
    assert isinstance(found, Target)
    pytest.importorskip("transformers")
    job = build_job(BuildRequest(target=found, inputs=("16",)))
    network = Simulator(job).describe({"batch_size": 4})
    counts = network.table.counts
    assert counts["Linear"] == 2 * 7 + 1
    assert network.table.parameters == sum(item.numel() for item in job.module.parameters())


def test_a_safetensors_header_brackets_the_network(tmp_path: Path, recorded: LayerTable) -> None:
    path = written(tmp_path, "weights", safetensors_file())
    found = read_network_file(path, ((3, SIDE, SIDE),))
    assert isinstance(found, NetworkDescription)
    assert found.widest is not None
    assert found.table.parameters == recorded.parameters
    assert found.table.trainable_elements == recorded.trainable_elements
    assert found.table.activations < recorded.activations < found.widest.activations
    assert "inferred" in found.notes[0]
    with pytest.raises(UserError, match="expected the shape of one input beside parameters alone"):
        read_network_file(path)


def test_a_config_is_handed_on_unless_it_names_code(tmp_path: Path) -> None:
    path = written(tmp_path, "anything.json", json.dumps(config_value()).encode())
    assert read_network_file(path) == config_value()
    for change, words in (
        (
            {"auto_map": {"AutoModel": "modeling.Net"}},
            "found auto_map, which names code of its own: such code is never run",
        ),
        ({"num_hidden_layers": 10**9}, "expected num_hidden_layers of at most 1000"),
        ({"architectures": ["os.system"]}, "expected a class of transformers"),
        ({"architectures": []}, "expected 'architectures'"),
        ({"vision_config": {"deep": {"auto_map": {}}}}, "found auto_map"),
    ):
        with pytest.raises(UserError, match=words):
            read_network_bytes(json.dumps({**config_value(), **change}).encode())


def test_other_files_are_named_in_the_error(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2)}, tmp_path / "weights.pt")
    for name, content, words in (
        ("weights.pt", None, "weights of torch.save, which are a pickle"),
        ("a.pkl", b"\x80\x04\x95\x00", "a pickle, which is never opened because it may hold code"),
        ("a.h5", b"\x89HDF\r\n\x1a\n" + bytes(50), "a file of HDF5"),
        ("a.gguf", b"GGUF" + bytes(50), "a GGUF file"),
        ("a.bin", b"\xff\xfe\x00nothing", "found bytes of something else"),
        ("empty", b"", "expected the text of torchinfo or torchsummary"),
    ):
        path = tmp_path / name if content is None else written(tmp_path, name, content)
        with pytest.raises(UserError, match=words):
            read_network_file(path)


def test_reading_a_graph_imports_no_library_of_it(tmp_path: Path) -> None:
    """The reader of Keras and of exported programs works where neither is installed."""
    source = "import sys; from vramcast.jobs.network_files import keras_graph, exported_program, safetensors_header; "
    source += "sys.exit(any(name in sys.modules for name in ('torch', 'keras', 'onnx', 'safetensors', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", source], check=False).returncode == 0
