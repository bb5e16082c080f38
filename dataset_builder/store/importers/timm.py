"""The table of timm networks that stands beside GPUMemNet's study of FakeTensor."""

import ast
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from vramcast.dataset_builder.schema import Spec
from vramcast.dataset_builder.store.importers.gpumemnet import CITATION
from vramcast.dataset_builder.store.importers.layout import Label, Layout, Record, measured
from vramcast.virtual_gpu.measurement import TRIAL, Measurement, Status
from vramcast.virtual_gpu.sizes import MIB
from vramcast.virtual_gpu.training_setup import TrainingSetup

_TIMM_CLASSES = {
    "usable": (Status.OK, None),
    "near_capacity": (Status.CENSORED, "the peak is within 1 GB of the card"),
    "probable_OOM_or_crash": (Status.CRASHED, "the peak is too low for the network: out of memory or crashed"),
    "crash_label_mismatch(num_classes<1000)": (Status.CRASHED, "fewer classes than labels: the first loss raises"),
}


_MEASURED_INPUT = {"ese_vovnet57b": [3, 224, 224]}
"""Where the table's input is that of a later timm (1.0.30, as its parameters are) and not the measured one.

FakeTensor's figure, taken with the measurement, grows by 88 MiB a sample. So do the tensors of this network at
224 pixels; at its present default of 256 they grow by 115. No other network of the table is so far from it.
"""


def _spec(record: Record) -> Spec:
    name = record["model"]
    network = {
        "name": name,
        "input_shape": _MEASURED_INPUT.get(name) or ast.literal_eval(record["timm_default_input"]),
        "num_classes": int(record["num_classes"]),
        **({"windows": True} if "hiera" in name else {}),  # measured when timm's Hiera attended like that
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
_NOISE = 1.02
"""Peaks of one job differ by less from run to run."""
_SLACK = 1.1
_SHARE_SLACK = 1.25
_FIXED_MIB = 300
"""What a job may take whatever its batch, beside four copies of its parameters: workspaces, cache."""


@dataclass(frozen=True)
class _Line:
    place: int
    batch: int
    own_mib: float
    """Above the floor."""
    parameter_mib: float | None
    """None where the table does not say."""


def trials(records: Sequence[Record]) -> dict[int, str]:
    """The lines, by their places, that took what memory does not do as a batch grows.

    It does not fall; what is above the floor does not grow faster than the batch; and beside parameters, gradients and
    momentum a part of a batch takes that part. A figure that does otherwise is one in which the sampling met a trial of
    cudnn.benchmark. The rule looks at measurements alone, never at an estimate.
    """
    networks: dict[str, list[_Line]] = defaultdict(list)
    for place, record in enumerate(records):
        if record["row_class"] == "usable":
            parameters = record.get("params_timm_1_0_30")
            own_mib = float(record["max_gpu_mem_mib"]) - _FLOOR_MIB
            size_mib = 4 * float(parameters) / MIB if parameters else None
            networks[record["model"]].append(_Line(place, int(record["batch_size"]), own_mib, size_mib))
    return {line.place: TRIAL for lines in networks.values() for line in lines if _is_trial(line, lines)}


def _is_trial(line: _Line, lines: Sequence[_Line]) -> bool:
    return any(line.own_mib > _most_mib(line, other) for other in lines if other.batch != line.batch)


def _most_mib(line: _Line, other: _Line) -> float:
    """What a line can take in view of another one of its network."""
    share_mib = other.own_mib * line.batch / other.batch
    if other.batch < line.batch:
        return _SLACK * share_mib
    if line.parameter_mib is None:
        return _NOISE * other.own_mib
    return min(_NOISE * other.own_mib, _SHARE_SLACK * share_mib + 4 * line.parameter_mib + _FIXED_MIB)


_COLUMNS = frozenset({"model", "batch_size", "max_gpu_mem_mib", "num_classes", "timm_default_input", "row_class"})
LAYOUT = Layout("timm", _COLUMNS, _spec, (Label("a100_40gb_timm_2024", "2024", _measurement),), CITATION, trials)
