"""Examples made by hand: MLPs given by their widths, with a label."""

from itertools import pairwise

from vramcast.jobs.analysis.static import static_estimate
from vramcast.jobs.spec import LayerRecord, LayerTable
from vramcast.models.example import Example, Label
from vramcast.virtual_gpu.measurement import Measurement, Status
from vramcast.virtual_gpu.training.setup import TrainingSetup

MIB = 2**20
CARD_BYTES = 40_000 * MIB
OVERHEAD_BYTES = 500 * MIB


def mlp_table(*widths: int) -> LayerTable:
    """Return the table of Linear layers of these widths, the input's first, with ReLUs between them."""
    layers, shapes = [], []
    for index, (inputs, outputs) in enumerate(pairwise(widths)):
        if index:
            layers.append(LayerRecord(f"{index}a", "ReLU", (inputs,), inputs, 0))
        layers.append(LayerRecord(str(index), "Linear", (outputs,), outputs, outputs * (inputs + 1)))
        shapes += [(outputs, inputs), (outputs,)]
    return LayerTable(tuple(layers), tuple(shapes), widths[0])


def example_of(
    table: LayerTable,
    *,
    used_bytes: int | None = None,
    fits: bool = True,
    family: str = "mlp",
    simulated: Measurement | None = None,
    name: str = "made",
    **training: object,
) -> Example:
    """Return an example on a device of 40,000 MiB with 500 MiB of overhead."""
    setup = TrainingSetup(**{"batch_size": 8, **training})
    return Example(
        id=name,
        group=name,
        design=name,
        family=family,
        training=setup,
        layers=table.layers,
        input_elements=table.input_elements,
        static=static_estimate(setup, table),
        simulated=simulated,
        overhead_bytes=OVERHEAD_BYTES,
        capacity_bytes=CARD_BYTES,
        source="made",
        label=None if used_bytes is None else Label(used_bytes, fits),
    )


def simulated(reserved_bytes: int, fits: bool = True, workspace_bytes: int = 0, **parts: int) -> Measurement:
    """A simulation whose parts are the reserved bytes where nothing else is said."""
    found = {"requested_bytes": reserved_bytes, "allocated_bytes": reserved_bytes, **parts}
    status, breakdown = Status.OK if fits else Status.OOM, {"workspace": workspace_bytes}
    return Measurement(status=status, reserved_bytes=reserved_bytes, breakdown=breakdown, **found)


def measured_mlps(count: int, start: int = 0) -> list[Example]:
    """Return MLPs whose memory is a polynomial of width and batch; every tenth does not fit."""
    found = []
    for index in range(start, start + count):
        width, batch = 64 + 37 * (index * 7 % 50), 8 * (1 + index * 3 % 11)
        table = mlp_table(width, width, width, 10)
        need_bytes = 900 * MIB + 16 * table.parameters + 4 * batch * (table.activations + width)
        fits = index % 10 != 9
        found.append(
            example_of(
                table,
                used_bytes=need_bytes if fits else CARD_BYTES - 100 * MIB,
                fits=fits,
                family="mlp" if index % 2 else "other",
                simulated=simulated(need_bytes - OVERHEAD_BYTES, fits),
                name=f"mlp{index}",
                batch_size=batch,
            )
        )
    return found
