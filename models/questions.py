"""A job on a device, ready to be answered: what features are computed from, and what the answer says beside them."""

from dataclasses import dataclass, field

from vramcast.dataset_builder.schema import LayerTable
from vramcast.dataset_builder.simulation.findings import Findings
from vramcast.models.example import Example
from vramcast.models.examples import example_of_findings, example_of_table
from vramcast.virtual_gpu.measurement import Measurement
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.training_setup import TrainingSetup


@dataclass(frozen=True)
class Question:
    """One job on one device."""

    target: str
    example: Example
    profile: DeviceProfile
    endless: Example | None = None
    """The same on a card without an end: what a job that does not fit would need."""
    peak: Measurement | None = None
    """What the breakdown is taken from: the simulation, without an end where the card is too small."""
    notes: tuple[str, ...] = field(default=())


def question_of(target: str, findings: Findings, profile: DeviceProfile) -> Question:
    """An inspected network on one of the devices that it was inspected on."""
    return Question(
        target=target,
        example=example_of_findings(findings, profile),
        profile=profile,
        endless=example_of_findings(findings, profile, endless=True),
        peak=findings.endless[profile.name],
        notes=(*findings.notes, *findings.measurements[profile.name].notes),
    )


def question_of_table(
    target: str, table: LayerTable, training: TrainingSetup, profile: DeviceProfile, family: str | None = None
) -> Question:
    """A network of which nothing but a layer table is known."""
    note = "classified from a layer table alone: nothing was simulated, and the safe figure is wider"
    example = example_of_table(table, training, profile, family=family)
    return Question(target, example, profile, notes=(note, *profile.notes))
