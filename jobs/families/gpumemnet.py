"""Parses the file names of GPUMemNet's public data sets into specs.

The rules of its generator: an epoch has 4,096 samples (a Transformer's name has its own number), the optimizer is Adam,
and a layer summary runs forward once with two samples (a Transformer: twice with the full batch). A run ends after 60
seconds, so a large Transformer never reaches the smaller last batch of its first epoch.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from vramcast.errors import UserError, check_count
from vramcast.jobs.families import make_spec
from vramcast.jobs.spec import Spec
from vramcast.virtual_gpu.training.setup import TrainingSetup

_SAMPLES = 4096
_SUMMARY_BATCH = 2
_LIMIT_SECONDS = 60
_FLOPS_PER_SECOND = 13e12  # two thirds of the peak fp32 rate of an A100 without tensor cores (its data sheet)
_BYTES_PER_SECOND = 1.3e12  # five sixths of its memory bandwidth (its data sheet: 1,555 GB/s)
_PARAMETER_PASSES = 12
"""Passes of a step over memory of the size of all parameters: gradients, and Adam with foreach."""
_MLP = "input:{int}_output:{int}_depth:{int}_arch:{word}_batch:{int}"
_REST = "_act:{word}_dropout:{float}_dropout:{flag}_batchnorm:{flag}"
_CNN = (
    "input_channels:{int}_num_classes:{int}_depth:{int}_arch:{word}_base_filters:{int}_batch:{int}_input_size:{int}"
    + _REST
)
_TRANSFORMER = (
    "num_classes:{int}_embedding_size:{int}_num_layers:{int}_num_heads:{int}_ff_hidden_size:{int}"
    "_dropout_rate:{float}_seq_length:{int}_input_size:{int}_num_samples:{int}_batch_size:{int}"
)
_FORMS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "int": (r"(\d+)", int),
    "word": (r"([A-Za-z_]+?)", str),
    "float": (r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)", float),
    "flag": (r"(True|False)", lambda text: text == "True"),
}


def spec_of_filename(filename: str, hidden: Mapping[str, Any] | None = None) -> Spec:
    """Return the spec of a file name in the public data sets.

    `hidden` overrides network factors that the generator drew but did not write into the name: `transition_every` of a
    dense CNN, `head` of an MLP with one output.
    """
    name = filename.strip().removesuffix(".out")
    for pattern, make in _READERS:
        values = _match(pattern, name)
        if values is not None:
            family, network, training = make(*values)
            return make_spec(family, {**network, **(hidden or {})}, training)
    example = _MLP.format(int="8", word="uniform")
    raise UserError(f"expected a file name of GPUMemNet such as {example}.out, found {filename!r}: check it")


def _match(pattern: str, name: str) -> list[Any] | None:
    kinds = re.findall(r"{(\w+)}", pattern)
    regex = re.sub(r"{(\w+)}", lambda item: _FORMS[item[1]][0], pattern)
    match = re.fullmatch(regex, name)
    if not match:
        return None
    return [_FORMS[kind][1](text) for kind, text in zip(kinds, match.groups(), strict=True)]


def _training(batch: int, samples: int = _SAMPLES, **more: Any) -> TrainingSetup:
    settings = {"dry_run_batch_size": _SUMMARY_BATCH, **more}
    check_count("the batch", batch)
    return TrainingSetup(batch_size=batch, last_batch_size=samples % batch or None, **settings)


Named = tuple[str, dict[str, Any], TrainingSetup]


def _mlp(inputs: int, outputs: int, depth: int, arch: str, batch: int) -> Named:
    network = {"arch": arch, "input_features": inputs, "output_features": outputs, "depth": depth}
    return "mlp", network, _training(batch, loss="cross_entropy" if outputs > 1 else "bce_with_logits")


def _mlp_with_norm(inputs: int, outputs: int, depth: int, arch: str, batch: int, *rest: Any) -> Named:
    family, network, training = _mlp(inputs, outputs, depth, arch, batch)
    # With one output the generator drew at random whether to add a sigmoid, which is not in the name.
    return family, {**network, **_block(*rest), "head": "softmax" if outputs > 1 else "none"}, training


def _cnn(channels: int, classes: int, depth: int, arch: str, filters: int, batch: int, size: int, *rest: Any) -> Named:
    network = {
        "arch": arch,
        "input_channels": channels,
        "input_size": size,
        "num_classes": classes,
        "depth": depth,
        "base_filters": filters,
        "head": "softmax" if classes > 1 else "sigmoid",
        **_block(*rest),
    }
    return "cnn", network, _training(batch, loss="cross_entropy" if classes > 1 else "bce")


def _block(act: str, rate: float, dropout: bool, norm: bool) -> dict[str, Any]:
    return {
        "activation": act,
        "dropout": rate if dropout else 0.0,
        "norm": "batch" if norm else "none",
    }


def _transformer(
    classes: int,
    size: int,
    layers: int,
    heads: int,
    wide: int,
    rate: float,
    length: int,
    words: int,
    samples: int,
    batch: int,
) -> Named:
    network = {
        "kind": "encoder",
        "vocabulary": words,
        "embedding_size": size,
        "layers": layers,
        "heads": heads,
        "feed_forward_size": wide,
        "sequence_length": length,
        "num_classes": classes,
        "dropout": rate,
    }
    matrices = layers * (4 * size**2 + 2 * size * wide)
    parameter_bytes = 4 * (words * size + matrices)
    step_seconds = (
        6 * batch * length * matrices / _FLOPS_PER_SECOND + _PARAMETER_PASSES * parameter_bytes / _BYTES_PER_SECOND
    )
    trained_samples = samples if -(-samples // batch) * step_seconds <= _LIMIT_SECONDS else batch
    return "transformer", network, _training(batch, trained_samples, dry_run_batch_size=batch, dry_run_passes=2)


_READERS: tuple[tuple[str, Callable[..., Named]], ...] = (
    (_MLP, _mlp),
    (_MLP + _REST, _mlp_with_norm),
    (_CNN, _cnn),
    (_TRANSFORMER, _transformer),
)
