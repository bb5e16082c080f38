"""Journals to read and to damage."""

from pathlib import Path

from vramcast.dataset_builder.rows import Provenance, Rejection, Row
from vramcast.dataset_builder.store import JournalWriter
from vramcast.jobs.spec import Spec, StaticEstimate
from vramcast.virtual_gpu.measurement import Measurement, Status
from vramcast.virtual_gpu.training.setup import TrainingSetup

BUILD = {"seed": 1, "n": 10, "family": {"name": "mlp"}}


def make_row(i: int, network: dict | None = None, evidence: str | None = None) -> Row:
    return Row(
        Spec("mlp", {"width": i, **(network or {})}, TrainingSetup(batch_size=32)),
        StaticEstimate(i, i, 2 * i, 3 * i) if i % 2 else None,
        Measurement(status=Status.OK, reserved_bytes=i, breakdown={"parameters": i}, evidence=evidence),
        Provenance(
            origin="simulated",
            backend="virtual",
            device=None,
            versions={"torch": "2"},
            seed=1,
            time="2026-01-01",
        ),
    )


def make_rejection(i: int) -> Rejection:
    return Rejection(Spec("cnn", {"width": i}, TrainingSetup(batch_size=1)), f"too narrow: {i}")


def write(directory: Path, numbers, build=BUILD) -> Path:
    with JournalWriter(directory, build) as writer:
        for i in numbers:
            writer.append(make_row(i))
    return directory / "journal.jsonl"
