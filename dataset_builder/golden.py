"""Twenty golden specs, which run on a real GPU and on the virtual one to compare both.

They vary everything that decides memory: layers, widths, batch sizes, a smaller last batch, optimizers and their
implementations, precisions, accumulation, checkpointing, dry runs. Each fits into 8 GB and takes seconds.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from vramcast.jobs.families import make_spec
from vramcast.jobs.spec import Spec
from vramcast.virtual_gpu.training.setup import TrainingSetup


def _mlp(arch: str, features: int, depth: int, **more: Any) -> tuple[str, dict[str, Any]]:
    return "mlp", {"arch": arch, "input_features": features, "output_features": 100, "depth": depth, **more}


def _cnn(arch: str, size: int, filters: int, depth: int, **more: Any) -> tuple[str, dict[str, Any]]:
    network = {"input_channels": 3, "input_size": size, "num_classes": 100, "depth": depth, "base_filters": filters}
    return "cnn", {"arch": arch, **network, **more}


def _transformer(kind: str, embedding: int, layers: int, length: int, **more: Any) -> tuple[str, dict[str, Any]]:
    network = {"vocabulary": 8192, "heads": 8, "feed_forward_size": 4 * embedding, "sequence_length": length}
    return "transformer", {"kind": kind, "embedding_size": embedding, "layers": layers, **network, **more}


def _template(name: str, stages: list[list[int]], size: int, **more: Any) -> tuple[str, dict[str, Any]]:
    return "template", {"template": name, "stages": stages, "input_size": size, "num_classes": 100, **more}


_VGG = [[64, 2], [128, 2], [256, 2], [256, 2]]
_RESNET = [[64, 2], [128, 2], [256, 2], [512, 2]]
_MOBILENET = [[64, 1], [128, 2], [256, 2], [512, 6], [1024, 2]]

_SPECS: Mapping[str, tuple[tuple[str, dict[str, Any]], dict[str, Any]]] = {
    "mlp, small": (_mlp("pyramid", 784, 3), {"batch_size": 64}),
    "mlp, wide batch, odd last": (_mlp("uniform", 2048, 6), {"batch_size": 8192, "last_batch_size": 1000}),
    "mlp, SGD with momentum": (_mlp("gradual", 4096, 8), {"batch_size": 512, "optimizer": "SGD(momentum=0.9)"}),
    "mlp, AdamW fused, bf16": (
        _mlp("uniform", 4096, 8, norm="layer", activation="gelu"),
        {"batch_size": 1024, "optimizer": "AdamW", "implementation": "fused", "dtype": "bf16"},
    ),
    "mlp, RMSprop one by one, accumulated": (
        _mlp("bottleneck", 8192, 4, norm="batch"),
        {"batch_size": 256, "optimizer": "RMSprop", "implementation": "single", "accumulate": 4},
    ),
    "cnn, uniform": (_cnn("uniform", 64, 64, 6), {"batch_size": 64, "last_batch_size": 17}),
    "cnn, pyramid with pooling": (
        _cnn("pyramid", 96, 32, 6, norm="batch", pooling="max"),
        {"batch_size": 64, "optimizer": "SGD"},
    ),
    "cnn, residual, fp16 autocast": (_cnn("residual", 64, 64, 8, norm="batch"), {"batch_size": 64, "autocast": "fp16"}),
    "cnn, dense, dry run": (_cnn("dense", 48, 32, 4, norm="batch"), {"batch_size": 32, "dry_run_batch_size": 2}),
    "cnn, hourglass, Adagrad": (
        _cnn("hourglass", 64, 128, 5, norm="group", activation="swish"),
        {"batch_size": 32, "optimizer": "Adagrad"},
    ),
    "transformer encoder": (_transformer("encoder", 256, 4, 128), {"batch_size": 32, "last_batch_size": 5}),
    "transformer encoder, bf16 autocast": (
        _transformer("encoder", 512, 6, 256, activation="gelu", norm="pre"),
        {"batch_size": 16, "autocast": "bf16", "optimizer": "AdamW"},
    ),
    "transformer decoder": (_transformer("decoder", 512, 4, 256), {"batch_size": 8, "last_batch_size": 3}),
    "transformer decoder, checkpointed": (
        _transformer("decoder", 512, 8, 512),
        {"batch_size": 8, "checkpointing": True, "optimizer": "AdamW"},
    ),
    "transformer encoder-decoder": (
        _transformer("encoder_decoder", 256, 3, 128),
        {"batch_size": 16, "optimizer": "Adafactor"},
    ),
    "vgg": (_template("vgg", _VGG, 96, classifier_features=1024), {"batch_size": 32, "optimizer": "SGD(momentum=0.9)"}),
    "vgg, batch norm, odd last": (
        _template("vgg", _VGG, 64, classifier_features=1024, norm="batch", dropout=0.5),
        {"batch_size": 48, "last_batch_size": 7},
    ),
    "resnet": (_template("resnet", _RESNET, 224, norm="batch"), {"batch_size": 32, "optimizer": "SGD(momentum=0.9)"}),
    "resnet, fp16 autocast, accumulated": (
        _template("resnet", _RESNET, 160, norm="batch"),
        {"batch_size": 32, "autocast": "fp16", "accumulate": 2},
    ),
    "mobilenet": (_template("mobilenet", _MOBILENET, 128, norm="batch"), {"batch_size": 48, "optimizer": "RMSprop"}),
}


@cache
def golden_specs() -> Mapping[str, Spec]:
    """Return the specs by label, in order."""
    return {
        label: make_spec(family, network, TrainingSetup(**training))
        for label, ((family, network), training) in _SPECS.items()
    }
