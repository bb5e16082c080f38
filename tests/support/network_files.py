"""Small files of every form that describes a network, all of the same one where the form allows it.

`KERAS_BACKEND=torch python tests/support/network_files.py` records those that libraries write slowly: an archive of
torch.export, and layers of Keras with the sizes that Keras gives them.
"""

import io
import json
import math
import struct
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

SIDE, CLASSES, CHANNELS = 16, 5, 8
FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"


class SmallNetwork(nn.Module):
    """Convolutions with a skip connection, a pooling, attention over places and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, CHANNELS, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(CHANNELS)
        self.act = nn.ReLU()
        self.conv2 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=2)
        self.pool = nn.MaxPool2d(2)
        self.drop = nn.Dropout(0.1)
        self.fc = nn.Linear(CHANNELS * (SIDE // 2) ** 2, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.bn1(self.conv1(x)))
        x = self.pool(x + self.conv2(x))
        return self.fc(self.drop(x.flatten(1)))


def small_network() -> nn.Module:
    return SmallNetwork().train()


def exported_program() -> bytes:
    """Return the network in an archive that torch.export.save of torch 2.13 wrote."""
    return (FIXTURES / "small_network.pt2").read_bytes()


def graph_json() -> bytes:
    """Return the JSON inside of that archive."""
    with zipfile.ZipFile(io.BytesIO(exported_program())) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("models/model.json")))


@cache
def onnx_file() -> bytes:
    """Return the same network as ONNX, with the batch left open, as torch's exporter names its parts."""
    from onnx import TensorProto, helper, numpy_helper

    module = small_network()
    weights = [
        numpy_helper.from_array(value.detach().numpy(), name)
        for name, value in module.state_dict().items()
        if value.dtype == torch.float32
    ]
    norm = [f"bn1.{name}" for name in ("weight", "bias", "running_mean", "running_var")]
    nodes = [
        _node("Conv", "conv1", ["x", "conv1.weight"], "a", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        _node("BatchNormalization", "bn1", ["a", *norm], "b"),
        _node("Relu", "act", ["b"], "c"),
        _node("Conv", "conv2", ["c", "conv2.weight", "conv2.bias"], "d", kernel_shape=[3, 3], pads=[1] * 4, group=2),
        helper.make_node("Add", ["c", "d"], ["e"], name="/Add"),
        _node("MaxPool", "pool", ["e"], "f", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["f"], ["g"], name="/Flatten"),
        _node("Dropout", "drop", ["g"], "h"),
        _node("Gemm", "fc", ["h", "fc.weight", "fc.bias"], "y", transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, SIDE, SIDE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    model.ir_version = 9
    return model.SerializeToString()


def _node(kind: str, module: str, reads: list[str], writes: str, **attributes: Any) -> Any:
    from onnx import helper

    return helper.make_node(kind, reads, [writes], name=f"/{module}/{kind}", **attributes)


def keras_value() -> dict[str, Any]:
    """Return the JSON of a functional network of Keras 3 with a skip connection."""
    image = {"class_name": "InputLayer", "config": {"batch_shape": [None, SIDE, SIDE, 3], "name": "image"}}
    layers = [
        {**image, "name": "image", "inbound_nodes": []},
        _layer("Conv2D", "conv", ["image"], filters=CHANNELS, kernel_size=[3, 3], padding="same", use_bias=False),
        _layer("BatchNormalization", "norm", ["conv"], axis=-1),
        _layer("ReLU", "act", ["norm"]),
        _layer("Conv2D", "conv2", ["act"], filters=CHANNELS, kernel_size=[3, 3], padding="same", groups=2),
        _layer("Add", "add", ["act", "conv2"]),
        _layer("MaxPooling2D", "pool", ["add"], pool_size=[2, 2]),
        _layer("Flatten", "flat", ["pool"]),
        _layer("Dropout", "drop", ["flat"], rate=0.1),
        _layer("Dense", "fc", ["drop"], units=CLASSES, activation="linear"),
    ]
    config = {"name": "small", "layers": layers, "output_layers": [["fc", 0, 0]]}
    return {"module": "keras", "class_name": "Functional", "config": config}


def _layer(kind: str, name: str, inputs: list[str], **config: Any) -> dict[str, Any]:
    tensors = [{"class_name": "__keras_tensor__", "config": {"keras_history": [item, 0, 0]}} for item in inputs]
    call = {"args": tensors if len(tensors) == 1 else [tensors], "kwargs": {}}
    return {"class_name": kind, "name": name, "config": {"name": name, **config}, "inbound_nodes": [call]}


def safetensors_file(**extra: Any) -> bytes:
    """Return a file with the parameters of the same network, without their values."""
    tensors = {
        name: {"dtype": "F32", "shape": list(value.shape), "data_offsets": [0, 0]}
        for name, value in small_network().state_dict().items()
        if value.dtype == torch.float32
    }
    header = json.dumps({**tensors, **extra}).encode()
    return struct.pack("<Q", len(header)) + header


def config_value() -> dict[str, Any]:
    """Return the config.json of a small Llama."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    }  # fmt: skip


def forms() -> dict[str, bytes]:
    """Return the content of a file of every form."""
    return {
        "small.pt2": exported_program(),
        "model.json": graph_json(),
        "small.onnx": onnx_file(),
        "keras.json": json.dumps(keras_value()).encode(),
        "small.safetensors": safetensors_file(),
        "config.json": json.dumps(config_value()).encode(),
        "table.json": json.dumps(
            {
                "input_elements": 768,
                "layers": [
                    {"name": "a", "kind": "Conv2d", "output_shape": [8, 16, 16], "parameters": 216, "inputs": [-1]},
                    {"name": "b", "kind": "ReLU", "output_shape": [8, 16, 16], "saved": 2048, "inputs": [0]},
                    {"name": "c", "kind": "Linear", "output_shape": [5], "parameters": 10245, "trainable": 10245},
                ],
                "trainable_shapes": [[8, 3, 3, 3], [5, 2048], [5]],
            }
        ).encode(),
        "info.txt": """
==========================================================================================
Layer (type:depth-idx)                   Output Shape              Param #
==========================================================================================
SmallNetwork                             [2, 5]                    --
├─Conv2d: 1-1                            [2, 8, 16, 16]            216
├─ReLU: 1-2                              [2, 8, 16, 16]            --
├─Linear: 1-3                            [2, 5]                    10,245
==========================================================================================
Total params: 10,461
Trainable params: 10,461
Input size (MB): 0.01
Forward/backward pass size (MB): 0.03
""".encode(),
        "summary.txt": b"""
----------------------------------------------------------------
        Layer (type)               Output Shape         Param #
================================================================
            Conv2d-1            [-1, 8, 16, 16]             216
              ReLU-2            [-1, 8, 16, 16]               0
            Linear-3                    [-1, 5]           2,565
================================================================
Total params: 2,781
Trainable params: 2,781
Input size (MB): 0.00
""",
    }


def written(directory: Path, name: str, content: bytes) -> Path:
    """Write a file and return its path."""
    path = directory / name
    path.write_bytes(content)
    return path


def _keras_layers() -> list[dict[str, Any]]:
    """Return networks of one layer of each kind as Keras writes them, with their sizes."""
    import keras

    layers = keras.layers
    image, text = keras.Input((24, 20, 3)), keras.Input((12, 6))
    branches = [
        layers.Conv2D(4, (3, 5), strides=2, padding="valid"), layers.Conv2DTranspose(4, 3, strides=2),
        layers.DepthwiseConv2D(3, depth_multiplier=2, padding="same"), layers.SeparableConv2D(6, 3, strides=2),
        layers.ZeroPadding2D(((1, 2), (0, 3))), layers.Cropping2D(2), layers.UpSampling2D(2), layers.Flatten(),
        layers.AveragePooling2D(3, strides=2, padding="same"), layers.GlobalMaxPooling2D(), layers.PReLU(),
        layers.GroupNormalization(3), layers.Reshape((40, -1)), layers.Permute((3, 1, 2)), layers.RMSNormalization(),
        layers.BatchNormalization(), layers.Conv2D(4, 3, dilation_rate=3, padding="same", activation="relu"),
    ]  # fmt: skip
    steps = [
        layers.LSTM(5, return_sequences=True), layers.GRU(4), layers.SimpleRNN(3), layers.Conv1D(7, 3, strides=2),
        layers.Bidirectional(layers.LSTM(4)), layers.TimeDistributed(layers.Dense(9)), layers.LayerNormalization(),
        layers.Conv1DTranspose(4, 4, strides=2, padding="same"), layers.MaxPooling1D(3), layers.Cropping1D((1, 2)),
        layers.Dense(3, use_bias=False), layers.Softmax(), layers.GaussianDropout(0.1), layers.ZeroPadding1D(2),
    ]  # fmt: skip
    made = [
        keras.Model(given, layer(given)) for given, chosen in ((image, branches), (text, steps)) for layer in chosen
    ]
    made.append(keras.Model(text, layers.MultiHeadAttention(2, 5, value_dim=3)(text, text)))
    inner = keras.Sequential([keras.Input((12, 6)), layers.Dense(4, activation="gelu")], name="inner")
    made.append(keras.Model(text, layers.Dense(2)(inner(text))))
    return [
        {
            "network": json.loads(item.to_json()),
            "parameters": sum(math.prod(weight.shape) for weight in item.trainable_weights),
            "output_shape": list(item.output_shape[1:]),
        }
        for item in made
    ]


def _without_traces(content: bytes) -> bytes:
    """Return a graph without the lines of code that made it, which name files of this machine."""
    value = json.loads(content)
    for node in value["graph_module"]["graph"]["nodes"]:
        node["metadata"].pop("stack_trace", None)
    value.pop("guards_code", None)
    return json.dumps(value).encode()


def _record() -> None:
    program = torch.export.export(small_network(), (torch.randn(2, 3, SIDE, SIDE),))
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    with zipfile.ZipFile(buffer) as saved, zipfile.ZipFile(FIXTURES / "small_network.pt2", "w") as archive:
        for name in saved.namelist():
            if not name.endswith(".pt"):  # the example inputs, a pickle
                content = saved.read(name)
                archive.writestr(name, _without_traces(content) if name.endswith("models/model.json") else content)
    with (FIXTURES / "keras_layers.json").open("w", encoding="utf-8") as file:
        json.dump(_keras_layers(), file, indent=None, separators=(",", ":"))
        file.write("\n")


if __name__ == "__main__":
    _record()
