"""The table of well-known networks that GPUMemNet, CARMA and AEGIS measured on three stacks.

Its rows are for validation only: nothing may be fitted to them.
"""

from collections.abc import Callable, Sequence

from vramcast.dataset_builder.store.importers.layout import Layout, MeasuredColumn, Record, measured
from vramcast.jobs.recipes import spec_of_recipe
from vramcast.jobs.spec import Spec
from vramcast.virtual_gpu.measurement import VARYING, Measurement, Status

_CITATION = "GPUMemNet, CARMA and AEGIS, E. Yousefzadeh-Asl-Miandoab et al., IT University of Copenhagen, CC BY 4.0"
_TWO_GPUS = frozenset({"gpt2_large"})
"""Ran on two GPUs with DataParallel."""
_PADDED_TO_LONGEST = frozenset({"xlnet_base", "xlnet_large"})
"""Trained by transformers' Trainer, which pads a batch to its longest line; lines have up to 512 tokens."""
_SEQUENCE = "seq"


def _spec(record: Record) -> Spec | None:
    name, batch_size = record["model"], int(record["batch_size"])
    if name in _TWO_GPUS:
        return None
    size = record["input"]
    if size.startswith(_SEQUENCE):
        return spec_of_recipe(name, batch_size, {"sequence": int(size.removeprefix(_SEQUENCE))})
    shape, classes = [int(length) for length in size.split("x")], int(float(record["classes"]))
    return spec_of_recipe(name, batch_size, {"input_shape": shape, "num_classes": classes})


def _column(name: str) -> Callable[[Record, Spec], Measurement | None]:
    return lambda record, _: measured(record, Status.OK, column=name) if record.get(name) else None


def _notes(records: Sequence[Record]) -> dict[int, str]:
    return {index: VARYING for index, record in enumerate(records) if record["model"] in _PADDED_TO_LONGEST}


LAYOUT = Layout(
    "real networks",
    frozenset({"model", "batch_size", "input", "classes", "actual_mib_2024", "carma2025_mib", "aegis2026_mib"}),
    _spec,
    (
        MeasuredColumn("a100_40gb_gpumemnet_2024", "2024", _column("actual_mib_2024")),
        MeasuredColumn("a100_40gb", "2025", _column("carma2025_mib")),
        MeasuredColumn("a100_40gb", "2026", _column("aegis2026_mib")),
        MeasuredColumn("rtx_2080ti", "2026", _column("rtx2080ti_mib")),
    ),
    _CITATION,
    _notes,
)
