"""The table of timm networks in GPUMemNet's study of FakeTensor."""

import ast
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from vramcast.dataset_builder.store.importers.gpumemnet import CITATION
from vramcast.dataset_builder.store.importers.layout import Layout, MeasuredColumn, Record, measured
from vramcast.jobs.spec import Spec
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.measurement import TRIAL, Measurement, Status
from vramcast.virtual_gpu.training.setup import TrainingSetup

_TIMM_CLASSES = {
    "usable": (Status.OK, None),
    "near_capacity": (Status.CENSORED, "the peak is within 1 GB of the GPU's memory"),
    "probable_OOM_or_crash": (Status.CRASHED, "the peak is too low for the network: out of memory or crashed"),
    "crash_label_mismatch(num_classes<1000)": (Status.CRASHED, "fewer classes than labels: the first loss raises"),
}


_MEASURED_INPUT = {"ese_vovnet57b": [3, 224, 224]}
"""Inputs that differ from the table's column, which was filled in with a later timm (1.0.30).

FakeTensor's estimate, made with the measurement, grows by 88 MiB per sample. The tensors of this network grow by that
at 224 pixels, and by 115 MiB at the present default of 256. No other network of the table deviates as far.
"""
_MEASURED_ARGUMENTS = {"ecaresnext50t_32x4d": {"layers": [2, 2, 2, 2]}}
"""Networks that a later timm builds otherwise, as they were.

Up to timm 1.0.30, this one had two blocks in each stage. The table's column of parameters and FakeTensor's estimate
are those of that network; timm 1.0.31 builds 16 blocks.
"""


def _spec(record: Record) -> Spec:
    name = record["model"]
    network = {
        "name": name,
        "input_shape": _MEASURED_INPUT.get(name) or ast.literal_eval(record["timm_default_input"]),
        "num_classes": int(record["num_classes"]),
        **({"arguments": _MEASURED_ARGUMENTS[name]} if name in _MEASURED_ARGUMENTS else {}),
        **({"windows": True} if "hiera" in name else {}),  # timm's Hiera used windows at the time
    }
    # timm's train.py: its optimizer with weight decay, cudnn.benchmark, and its loader (data/loader.py), which creates
    # a third batch while the loop still holds the last one and the next one is ready
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
"""Less than any network of the table uses: context, cuDNN and other processes."""
_NOISE = 1.02
"""Peaks of repeated runs of one job differ by less than this ratio."""
_SLACK = 1.1
_SHARE_SLACK = 1.25
_FIXED_MIB = 300
"""Memory that does not depend on the batch, besides four copies of the parameters: workspaces, cache."""


@dataclass(frozen=True)
class _Run:
    place: int
    batch: int
    own_mib: float
    """Memory above the floor."""
    parameter_mib: float | None
    """None if the table has no value."""


def trials(records: Sequence[Record]) -> dict[int, str]:
    """Return the indices of lines whose peak is that of a trial of cudnn.benchmark.

    Memory does not fall as the batch grows, memory above the floor does not grow faster than the batch, and all but
    parameters, gradients and momentum is proportional to the batch. A line that violates this includes a trial of
    cudnn.benchmark. The rule uses measurements only, never an estimate.
    """
    networks: dict[str, list[_Run]] = defaultdict(list)
    for place, record in enumerate(records):
        if record["row_class"] == "usable":
            parameters = record.get("params_timm_1_0_30")
            own_mib = float(record["max_gpu_mem_mib"]) - _FLOOR_MIB
            size_mib = 4 * float(parameters) / MIB if parameters else None
            networks[record["model"]].append(_Run(place, int(record["batch_size"]), own_mib, size_mib))
    return {line.place: TRIAL for lines in networks.values() for line in lines if _is_trial(line, lines)}


def _is_trial(line: _Run, lines: Sequence[_Run]) -> bool:
    return any(line.own_mib > _most_mib(line, other) for other in lines if other.batch != line.batch)


def _most_mib(line: _Run, other: _Run) -> float:
    """Return an upper bound of a line's memory, given another line of the same network."""
    share_mib = other.own_mib * line.batch / other.batch
    if other.batch < line.batch:
        return _SLACK * share_mib
    if line.parameter_mib is None:
        return _NOISE * other.own_mib
    return min(_NOISE * other.own_mib, _SHARE_SLACK * share_mib + 4 * line.parameter_mib + _FIXED_MIB)


_COLUMNS = frozenset({"model", "batch_size", "max_gpu_mem_mib", "num_classes", "timm_default_input", "row_class"})
LAYOUT = Layout(
    "timm", _COLUMNS, _spec, (MeasuredColumn("a100_40gb_timm_2024", "2024", _measurement),), CITATION, trials
)
