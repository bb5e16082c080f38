"""The runs of xMem: bands, steps and notes of their rows, and estimates against a band."""

import csv
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from vramcast.dataset_builder.backends.virtual import trace_spec
from vramcast.dataset_builder.store.importers import read_rows
from vramcast.dataset_builder.store.importers.xmem import LAYOUT
from vramcast.dataset_builder.store.importers.xmem_networks import CLASSIFIERS, IMAGE
from vramcast.device.profiles import load_profile
from vramcast.errors import UserError
from vramcast.jobs.families.external import build_external
from vramcast.jobs.spec import Spec
from vramcast.models.metrics import PredictedRows, score
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.measurement import VARYING, Status
from vramcast.virtual_gpu.replay.replay import FREE
from vramcast.virtual_gpu.replay.simulate import simulate
from vramcast.virtual_gpu.tracing.trace import Use
from vramcast.virtual_gpu.training.setup import TrainingSetup
from vramcast.virtual_gpu.training.step import training_steps


def run(**changes):
    cells = {"kind": "CNN", "model": "VGG16", "optimizer": "Adam", "batch_size": 200, "gpu": "RTX 3060"}
    return {**cells, "ground_bytes": 1000 * MIB, "real_oom": "false", "zero_grad_mode": "", **changes}


def language(**changes):
    return run(**{"kind": "Transformer", "model": "T5-small", "batch_size": 20, **changes})


@pytest.fixture
def imported(tmp_path):
    def read(*records):
        path = tmp_path / "runs.csv"
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(records[0]))
            writer.writeheader()
            writer.writerows(records)
        return list(read_rows(path))

    return read


def test_the_label_of_a_cnn_is_a_band_and_that_of_a_transformer_is_not(imported):
    cnn, transformer = imported(run(), language())
    weights_bytes = 4 * CLASSIFIERS["VGG16"].parameters
    assert cnn.measurement.least_used_bytes == 1126 * MIB
    assert cnn.measurement.device_used_bytes == 1000 * MIB + weights_bytes
    assert cnn.spec.network == {"name": "vgg16", "input_shape": [3, 86, 86], "num_classes": 1000}
    assert transformer.measurement.least_used_bytes is None
    assert transformer.measurement.device_used_bytes == 1000 * MIB


def test_each_gpu_has_its_profile(imported):
    rows = imported(*(run(gpu=gpu) for gpu in ("RTX 3060", "RTX 4060", "A100-SXM4-40GB")))
    assert [row.provenance.device for row in rows] == [
        "rtx_3060_xmem_2025",
        "rtx_4060_xmem_2025",
        "a100_40gb_xmem_2025",
    ]


def test_modes_say_when_gradients_are_dropped(imported):
    rows = imported(run(), language(), *(run(zero_grad_mode=mode) for mode in "012"))
    assert [row.spec.training.zero_grad for row in rows] == [
        "before_backward",
        "after_step",
        "after_step",
        "before_backward",
        "after_step",
    ]


def test_small_batches_of_texts_are_marked_unless_they_are_padded(imported):
    rows = imported(
        language(batch_size=12),
        language(batch_size=13),
        language(batch_size=1, model="Qwen/Qwen3-4B"),
        run(batch_size=1),
    )
    assert [VARYING in row.measurement.notes for row in rows] == [True, False, False, False]


def test_a_run_out_of_memory_and_an_unknown_network(imported):
    (row,) = imported(language(real_oom="true"))
    assert row.measurement.status is Status.OOM
    with pytest.raises(UserError, match=r"runs.csv:2, found: the network 'AlexNet'"):
        imported(run(model="AlexNet"))


@pytest.mark.parametrize("name", ["MnasNet", "RegNetX400MF"])
def test_the_parameters_are_those_of_the_network(name):
    classifier = CLASSIFIERS[name]
    network = {"name": classifier.name, "input_shape": list(IMAGE), "num_classes": classifier.num_classes}
    module, _ = build_external("torchvision", network)
    assert sum(item.numel() for item in module.parameters()) == classifier.parameters


def test_every_public_run_is_read(public_table):
    rows = list(read_rows(public_table("xmem/runs.csv")))
    assert len(rows) == 257
    assert sum(row.measurement.status is Status.OOM for row in rows) == 24
    assert sum(row.measurement.least_used_bytes is not None for row in rows) == 126


@pytest.mark.parametrize(
    ("moment", "in_forward", "in_backward", "at_end"),
    [
        ("before_forward", False, False, True),
        ("before_backward", True, False, True),
        ("after_step", False, False, False),
    ],
)
def test_gradients_are_dropped_at_the_moment_that_the_setup_names(moment, in_forward, in_backward, at_end):
    network = nn.Linear(3, 2)
    seen = []
    network.register_forward_hook(lambda *_: seen.append(network.weight.grad is not None))
    network.register_full_backward_pre_hook(lambda *_: seen.append(network.weight.grad is not None))
    optimizer = torch.optim.SGD(network.parameters())
    batches = [[(torch.randn(4, 3, requires_grad=True),)] for _ in range(2)]
    list(training_steps(network, optimizer, batches, "cross_entropy", zero_grad=moment))
    assert seen[2:] == [in_forward, in_backward]
    assert (network.weight.grad is not None) == at_end


def test_a_trace_holds_old_gradients_as_long_as_the_setup_says():
    network = {"input_features": 8, "output_features": 10, "depth": 3, "arch": "uniform"}
    freed_first = {}
    for moment in ("before_backward", "after_step"):
        spec = Spec("mlp", network, TrainingSetup(batch_size=4, optimizer="SGD", zero_grad=moment))
        trace = trace_spec(spec)
        uses = [(trace.uses[block], size == FREE) for block, size in trace.events if block >= 0]
        second_batch = [index for index, use in enumerate(uses) if use == (Use.INPUTS, False)][1]
        freed_first[moment] = uses.index((Use.GRADIENTS, True)) < second_batch
    assert freed_first == {"before_backward": False, "after_step": True}


def test_an_estimate_within_a_band_has_no_error():
    count = 4
    rows = PredictedRows(
        family=np.array(["torchvision"] * count),
        stack=np.array(["a"] * count),
        used_bytes=np.full(count, 200.0),
        fits=np.full(count, True),
        true_class=np.zeros(count, dtype=np.int64),
        predicted_class=np.zeros(count, dtype=np.int64),
        point_bytes=np.array([90.0, 100.0, 150.0, 220.0]),
        called_too_large=np.full(count, False),
        reserved_bytes=np.full(count, 300.0),
        least_bytes=np.full(count, 100.0),
    )
    assert rows.relative_errors.tolist() == pytest.approx([-0.1, 0.0, 0.0, 0.1])
    assert score(rows).point_too_low == 0.25


@pytest.mark.parametrize("batch_size", [551, 560])
def test_a_run_with_too_little_memory_completes_without_workspaces_as_on_the_gpu(public_rows, batch_size):
    """xMem's second runs had its own estimate as the limit of the allocator."""
    records = [item for item in public_rows("xmem/runs.csv") if item["model"] == "VGG16"]
    (record,) = [item for item in records if item["batch_size"] == str(batch_size)]
    assert record["xmem_2nd_verif_oom"] == "false"
    profile = load_profile("rtx_3060_xmem_2025")
    trace = trace_spec(LAYOUT.spec(record), profile.compute_capability)
    limit_bytes = int(record["xmem_estimate_bytes"])
    overhead_bytes = profile.overhead_bytes(convolutions=True)
    limited = replace(profile, driver_mib=0, total_mib=(limit_bytes + overhead_bytes) // MIB)
    whole = simulate(trace, profile, AllocatorOptions())
    capped = simulate(trace, limited, AllocatorOptions())
    assert whole.status is capped.status is Status.OK
    assert whole.reserved_bytes > limit_bytes >= capped.reserved_bytes
    assert any("more slowly" in note for note in capped.notes)
    assert not any("more slowly" in note for note in whole.notes)
