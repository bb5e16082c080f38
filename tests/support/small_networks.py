"""A small network of each family."""

from dataclasses import replace
from typing import Any

from vramcast.jobs import filters
from vramcast.jobs.families import make_spec
from vramcast.jobs.spec import LayerTable
from vramcast.virtual_gpu.training.setup import TrainingSetup

SETUP = TrainingSetup(batch_size=4)
NETWORKS: dict[str, dict[str, Any]] = {
    "mlp": {"arch": "pyramid", "input_features": 12, "output_features": 3, "depth": 2},
    "cnn": {
        "arch": "pyramid",
        "input_channels": 3,
        "input_size": 8,
        "num_classes": 5,
        "depth": 4,
        "base_filters": 4,
        "max_filters": 16,
    },
    "template": {"template": "vgg", "stages": [[4, 1], [8, 2]], "input_size": 16, "num_classes": 5},
    "transformer": {
        "kind": "encoder",
        "vocabulary": 11,
        "embedding_size": 8,
        "layers": 1,
        "heads": 2,
        "feed_forward_size": 16,
        "sequence_length": 4,
    },
}


def table_of(family: str, network: dict[str, Any], **setup: Any) -> LayerTable:
    table = filters.check(make_spec(family, network, replace(SETUP, **setup)))
    assert isinstance(table, LayerTable), table
    return table
