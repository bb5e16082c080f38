"""Public measurements as rows: GPUMemNet's sets, its reduced Transformer layout, and its timm table.

The sets label a run SUCCESSFUL unless its log says out of memory, so runs that died otherwise are found here by rule,
never by how well a figure fits.
"""

import ast
import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dataset_builder.analysis.static import static_estimate
from dataset_builder.errors import UserError
from dataset_builder.families.gpumemnet import spec_of_filename
from dataset_builder.filters import Rejected, check
from dataset_builder.schema import LayerTable, Measurement, Provenance, Row, Spec, Status, TrainingSetup
from dataset_builder.store.journal import JournalWriter

MIB = 2**20
PROFILE = "a100_40gb_gpumemnet_2024"
TIMM_PROFILE = "a100_40gb_timm_2024"
CITATION = "GPUMemNet, E. Yousefzadeh-Asl-Miandoab et al., IT University of Copenhagen, CC BY 4.0"

_LEAST_SIZE = 7
"""GPUMemNet's CNN script takes log2(size // 7) and dies where that is log2(0)."""
_OTHER_TRANSITION = 5
"""The second value of the coin that the generator tossed for a dense CNN's `transition_every`."""

Record = Mapping[str, str]


@dataclass(frozen=True)
class Layout:
    """One shape of public table: its columns, what a line of it means, and the stack that it was measured on."""

    name: str
    profile: str
    columns: frozenset[str]
    spec: Callable[[Record], Spec]
    measurement: Callable[[Record, Spec], Measurement]


def import_file(path: Path, out: Path) -> str:
    """Write the rows of a public table into a journal; says in a line what came of it."""
    layout, records = _open(path)
    counts = dict.fromkeys(Status, 0)
    settings = {"import": path.name, "layout": layout.name, "citation": CITATION}
    with JournalWriter(out, settings) as journal:
        known = len(journal.row_ids)
        for row in _rows(layout, records, path):
            counts[row.measurement.status] += 1
            if row.spec.id not in journal.row_ids:
                journal.append(row)
        new = len(journal.row_ids) - known
    found = ", ".join(f"{count} {status.value}" for status, count in counts.items() if count)
    return f"{sum(counts.values())} lines of {path.name} ({layout.name}): {found}; {new} rows added to {out}"


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a public table."""
    layout, records = _open(path)
    return _rows(layout, records, path)


def _open(path: Path) -> tuple[Layout, list[Record]]:
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            records: list[Record] = list(reader)
            columns = set(reader.fieldnames or ())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"expected a CSV table at {path}, found: {error}") from error
    for layout in _LAYOUTS:
        if layout.columns <= columns:
            return layout, records
    known = "; ".join(f"{layout.name}: {sorted(layout.columns)}" for layout in _LAYOUTS)
    raise UserError(
        f"expected the columns of a public table ({known}), found {sorted(columns)} in {path}: check the file"
    )


def _rows(layout: Layout, records: list[Record], path: Path) -> Iterator[Row]:
    provenance = Provenance(
        origin="measured",
        backend="nvidia-smi",
        device=layout.profile,
        versions={},
        seed=None,
        time="2024",
        source=f"{path.name}; {CITATION}",
    )
    for number, record in enumerate(records, 2):
        try:
            spec = layout.spec(record)
            measurement = layout.measurement(record, spec)
        except (ValueError, LookupError, TypeError, SyntaxError) as error:
            raise UserError(f"expected a {layout.name} line at {path}:{number}, found: {error}") from error
        table = _table(spec)
        yield Row(spec, static_estimate(spec.training, table) if table else None, measurement, provenance)


def _table(spec: Spec) -> LayerTable | None:
    """The layers of a network that is built here, with no regard to its odd last batch."""
    if spec.family == "timm":
        return None
    found = check(replace(spec, training=replace(spec.training, last_batch_size=None)))
    return None if isinstance(found, Rejected) else found


def _measured(
    record: Record, status: Status, evidence: str | None, column: str = "Max GPU Memory (MiB)"
) -> Measurement:
    return Measurement(status=status, device_used_bytes=int(float(record[column])) * MIB, evidence=evidence)


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
    table = _table(spec)
    return table.counts.get("Conv2d", 0) if table else 0


def _gpumemnet_measurement(record: Record, spec: Spec) -> Measurement:
    if record.get("Status", "").startswith("OOM"):
        return _measured(record, Status.OOM, "the run's log says out of memory; the figure is where it died")
    reason = _why_broken(record, spec)
    return _measured(record, Status.CRASHED if reason else Status.OK, reason)


def _why_broken(record: Record, spec: Spec) -> str | None:
    if spec.family == "cnn" and spec.network["input_size"] < _LEAST_SIZE:
        return f"images below {_LEAST_SIZE} pixels end the generator's script before CUDA starts"
    if spec.family == "mlp" and spec.network["output_features"] == 1 and "_act:" not in record["Filename"]:
        return "with one output the first set's labels do not fit and the first loss raises"
    verdict = check(spec)
    return verdict.reason if isinstance(verdict, Rejected) else None


_TIMM_CLASSES = {
    "usable": (Status.OK, None),
    "near_capacity": (Status.CENSORED, "the peak is within 1 GB of the card"),
    "probable_OOM_or_crash": (Status.CRASHED, "the peak is too low for the network: out of memory or crashed"),
    "crash_label_mismatch(num_classes<1000)": (Status.CRASHED, "fewer classes than labels: the first loss raises"),
}


def _timm_spec(record: Record) -> Spec:
    network = {
        "name": record["model"],
        "input_shape": ast.literal_eval(record["timm_default_input"]),
        "num_classes": int(record["num_classes"]),
    }
    # timm's train script: its optimizer, and its loader, which puts the next batch on the card while one is trained on
    training = TrainingSetup(batch_size=int(record["batch_size"]), optimizer="SGD(momentum=0.9)", prefetched_batches=1)
    return Spec("timm", network, training)


def _timm_measurement(record: Record, spec: Spec) -> Measurement:
    status, evidence = _TIMM_CLASSES[record["row_class"]]
    return _measured(record, status, evidence, "max_gpu_mem_mib")


_NAME_AND_PEAK = frozenset({"Filename", "Max GPU Memory (MiB)"})
_TIMM = frozenset({"model", "batch_size", "max_gpu_mem_mib", "num_classes", "timm_default_input", "row_class"})
_LAYOUTS = (
    Layout("GPUMemNet", PROFILE, _NAME_AND_PEAK | {"Activations-Params"}, _gpumemnet_spec, _gpumemnet_measurement),
    Layout("GPUMemNet, reduced", PROFILE, _NAME_AND_PEAK | {"Status"}, _gpumemnet_spec, _gpumemnet_measurement),
    Layout("timm", TIMM_PROFILE, _TIMM, _timm_spec, _timm_measurement),
)
