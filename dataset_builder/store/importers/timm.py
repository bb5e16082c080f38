"""The table of timm networks that stands beside GPUMemNet's study of FakeTensor."""

import ast
from collections import defaultdict
from collections.abc import Sequence

from dataset_builder.schema import TRIAL, Measurement, Spec, Status, TrainingSetup
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


_FLOOR_MIB = 1700
"""Below what any network of the table takes: context, cuDNN and what else was on the card."""
_SLACK = 1.1
_NOISE = 1.02
"""Peaks of one job differ by less from run to run."""


def trials(records: Sequence[Record]) -> dict[int, str]:
    """The lines, by their places, that took what memory does not do as a batch grows.

    It does not fall, and what is above the floor does not grow faster than the batch. A figure that does is one in
    which the sampling met a trial of cudnn.benchmark. The rule looks at measurements alone, never at an estimate.
    """
    networks: dict[str, list[tuple[int, int, float]]] = defaultdict(list)
    for place, record in enumerate(records):
        if record["row_class"] == "usable":
            batch, used_mib = int(record["batch_size"]), float(record["max_gpu_mem_mib"])
            networks[record["model"]].append((batch, place, used_mib - _FLOOR_MIB))
    return {place: TRIAL for lines in networks.values() for batch, place, own in lines if _is_trial(batch, own, lines)}


def _is_trial(batch: int, own_mib: float, lines: Sequence[tuple[int, int, float]]) -> bool:
    return any(
        own_mib > (_SLACK * other_mib * batch / other if other < batch else _NOISE * other_mib)
        for other, _, other_mib in lines
        if other != batch
    )


_COLUMNS = frozenset({"model", "batch_size", "max_gpu_mem_mib", "num_classes", "timm_default_input", "row_class"})
LAYOUT = Layout("timm", _COLUMNS, _spec, (Label("a100_40gb_timm_2024", "2024", _measurement),), CITATION, trials)
