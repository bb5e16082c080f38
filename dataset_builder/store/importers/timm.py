"""The table of timm networks that stands beside GPUMemNet's study of FakeTensor."""

import ast
from collections import defaultdict
from collections.abc import Sequence

from dataset_builder.schema import Measurement, Spec, Status, TrainingSetup
from dataset_builder.store.importers.gpumemnet import CITATION
from dataset_builder.store.importers.layout import Label, Layout, Record, measured

_TIMM_CLASSES = {
    "usable": (Status.OK, None),
    "near_capacity": (Status.CENSORED, "the peak is within 1 GB of the card"),
    "probable_OOM_or_crash": (Status.CRASHED, "the peak is too low for the network: out of memory or crashed"),
    "crash_label_mismatch(num_classes<1000)": (Status.CRASHED, "fewer classes than labels: the first loss raises"),
}


def _spec(record: Record) -> Spec:
    network = {
        "name": record["model"],
        "input_shape": ast.literal_eval(record["timm_default_input"]),
        "num_classes": int(record["num_classes"]),
    }
    # timm's train.py: its optimizer with its weight decay, cudnn.benchmark, and its loader (data/loader.py), which
    # makes a third batch while the loop still holds the last one and has the next one ready
    training = TrainingSetup(
        batch_size=int(record["batch_size"]),
        optimizer="SGD(momentum=0.9, nesterov=True, weight_decay=2e-05)",
        prefetched_batches=2,
        cudnn_benchmark=True,
    )
    return Spec("timm", network, training)


def _measurement(record: Record, spec: Spec) -> Measurement:
    status, evidence = _TIMM_CLASSES[record["row_class"]]
    return measured(record, status, evidence, "max_gpu_mem_mib")


SHRINKS = "a larger batch of the same network took less: likely met while cuDNN tried an algorithm"
_LEAST_SHRINKING = 1.02
"""Peaks of one job differ by less from run to run."""


def _marks(records: Sequence[Record]) -> dict[int, str]:
    """Completed rows above what a larger batch of their network took.

    With cudnn.benchmark, trials take workspaces that no later step needs, and sampling once a second meets few of them.
    """
    runs = defaultdict(list)
    for index, record in enumerate(records):
        if record["row_class"] == "usable":
            runs[record["model"]].append((int(record["batch_size"]), float(record["max_gpu_mem_mib"]), index))
    return {
        index: SHRINKS
        for items in runs.values()
        for batch, peak, index in items
        if any(other > batch and peak > _LEAST_SHRINKING * less for other, less, _ in items)
    }


_COLUMNS = frozenset({"model", "batch_size", "max_gpu_mem_mib", "num_classes", "timm_default_input", "row_class"})
LAYOUT = Layout("timm", _COLUMNS, _spec, (Label("a100_40gb_timm_2024", "2024", _measurement),), CITATION, _marks)
