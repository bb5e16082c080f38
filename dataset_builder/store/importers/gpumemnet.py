"""GPUMemNet's sets and its reduced Transformer layout.

The sets label a run SUCCESSFUL unless its log says out of memory. Runs that failed otherwise are found here by rules on
their configuration, never by comparing a value with an estimate.
"""

import ast
from dataclasses import replace

from vramcast.dataset_builder.store.importers.layout import Layout, MeasuredColumn, Record, measured
from vramcast.jobs.families import FAMILIES
from vramcast.jobs.families.gpumemnet import spec_of_filename
from vramcast.jobs.filters import Rejected, check
from vramcast.jobs.spec import LayerTable, Spec
from vramcast.virtual_gpu.measurement import Measurement, Status

CITATION = "GPUMemNet, E. Yousefzadeh-Asl-Miandoab et al., IT University of Copenhagen, CC BY 4.0"

_LEAST_SIZE = 7
"""GPUMemNet's CNN script computes log2(size // 7), which fails for smaller sizes."""
_OTHER_TRANSITION = 5
"""The other of the two values between which the generator chose a dense CNN's `transition_every`."""


def table_of(spec: Spec) -> LayerTable | None:
    """Return the layer table of a spec without its odd last batch; None for networks of other libraries."""
    if spec.family not in FAMILIES:
        return None
    table = check(replace(spec, training=replace(spec.training, last_batch_size=None)))
    return None if isinstance(table, Rejected) else table


def _gpumemnet_spec(record: Record) -> Spec:
    spec = spec_of_filename(record["Filename"])
    if spec.family == "mlp" and spec.network["output_features"] == 1 and "head" not in spec.network:
        last = ast.literal_eval(record["Activations-Params"])[-1][0].lower()
        return spec_of_filename(record["Filename"], {"head": last}) if last in ("sigmoid", "identity") else spec
    if spec.family == "cnn" and spec.network["arch"] == "dense" and _convolutions(spec) != int(record["Conv2d Count"]):
        other = spec_of_filename(record["Filename"], {"transition_every": _OTHER_TRANSITION})
        return other if _convolutions(other) == int(record["Conv2d Count"]) else spec
    return spec


def _convolutions(spec: Spec) -> int:
    table = table_of(spec)
    return table.counts.get("Conv2d", 0) if table else 0


def _gpumemnet_measurement(record: Record, spec: Spec) -> Measurement:
    if record.get("Status", "").startswith("OOM"):
        return measured(record, Status.OOM, "the run's log says out of memory; the value is the memory at that time")
    reason = _crash_reason(record, spec)
    return measured(record, Status.CRASHED if reason else Status.OK, reason)


def _crash_reason(record: Record, spec: Spec) -> str | None:
    if spec.family == "cnn" and spec.network["input_size"] < _LEAST_SIZE:
        return f"images below {_LEAST_SIZE} pixels end the generator's script before CUDA starts"
    if spec.family == "mlp" and spec.network["output_features"] == 1 and "_act:" not in record["Filename"]:
        return "with one output the labels of the first set do not match and the first loss raises"
    verdict = check(spec)
    return verdict.reason if isinstance(verdict, Rejected) else None


_NAME_AND_PEAK = frozenset({"Filename", "Max GPU Memory (MiB)"})
_MEASURED = (MeasuredColumn("a100_40gb_gpumemnet_2024", "2024", _gpumemnet_measurement),)
LAYOUTS = (
    Layout("GPUMemNet", _NAME_AND_PEAK | {"Activations-Params"}, _gpumemnet_spec, _MEASURED, CITATION),
    Layout("GPUMemNet, reduced", _NAME_AND_PEAK | {"Status"}, _gpumemnet_spec, _MEASURED, CITATION),
)
