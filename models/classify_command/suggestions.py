"""Suggestions that make a job fit, each simulated and estimated like the job itself."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vramcast.dataset_builder.simulation.client import NetworkError
from vramcast.errors import UserError
from vramcast.models.answer import FITS, TIGHT, Answer
from vramcast.virtual_gpu.training_setup import TrainingSetup, parse_call

if TYPE_CHECKING:
    from vramcast.models.classify_command.job_answers import JobAnswers

_LEAN = ("SGD", "Adafactor", "Adam8bit", "AdamW8bit")
"""Optimizers with little state, for which no leaner one is suggested."""


@dataclass(frozen=True)
class Suggestion:
    """A change of the job, and the answer with it."""

    change: str
    answer: Answer


def suggestions(
    job: "JobAnswers", answer: Answer, training: TrainingSetup, largest: Answer | None, devices: Sequence[Answer]
) -> list[Suggestion]:
    """Return changes that reduce the memory, the least costly first."""
    changes = list(_smaller_batches(job, answer, training, largest))
    single = [*_precisions(training), *_checkpointing(training), *_optimizers(training)]
    for change, options in single:
        changes += _tried(job, answer, change, options)
    combined = _combined(single)
    if combined and not any(item.answer.verdict == FITS for item in changes):
        changes += _tried(job, answer, *combined)
    bigger = [item for item in devices if item.capacity_mib > answer.capacity_mib]
    chosen = next((item for verdict in (FITS, TIGHT) for item in bigger if item.verdict == verdict), None)
    if chosen:
        changes.append(Suggestion(f"a bigger device: {chosen.device}", chosen))
    return changes


def _tried(job: "JobAnswers", answer: Answer, change: str, options: Mapping[str, Any]) -> Iterator[Suggestion]:
    """Yield a change unless the network does not support it or needs no less memory with it."""
    with suppress(UserError, NetworkError):
        changed = job.answer(answer.device, **options)
        if changed.estimate_mib < answer.estimate_mib:
            yield Suggestion(change, changed)


def _smaller_batches(
    job: "JobAnswers", answer: Answer, training: TrainingSetup, largest: Answer | None
) -> Iterator[Suggestion]:
    if largest is None:
        if training.batch_size > 1:
            yield from _tried(job, answer, "a batch of 1", {"batch_size": 1})
        return
    yield Suggestion(f"a batch of {largest.batch_size}", largest)
    size = training.batch_size
    parts = next((n for n in range(2, size + 1) if size % n == 0 and size // n <= largest.batch_size), None)
    if parts:
        change = f"the same batch in {parts} parts of {size // parts} (gradient accumulation)"
        options = {"batch_size": size // parts, "accumulate": parts * training.accumulate}
        yield from _tried(job, answer, change, options)


def _precisions(training: TrainingSetup) -> Iterator[tuple[str, dict[str, Any]]]:
    if training.autocast is None and training.dtype == "fp32":
        yield "mixed precision (--autocast bf16)", {"autocast": "bf16"}
        yield "all in bf16 (--dtype bf16)", {"dtype": "bf16"}


def _checkpointing(training: TrainingSetup) -> Iterator[tuple[str, dict[str, Any]]]:
    if not training.checkpointing:
        yield "activation checkpointing (--checkpointing)", {"checkpointing": True}


def _optimizers(training: TrainingSetup) -> Iterator[tuple[str, dict[str, Any]]]:
    if parse_call(training.optimizer)[0] not in _LEAN:
        yield "optimizer state in 8 bits (--optimizer adamw8bit)", {"optimizer": "adamw8bit"}
        yield "SGD without momentum (--optimizer sgd)", {"optimizer": "sgd"}


def _combined(single: Sequence[tuple[str, dict[str, Any]]]) -> tuple[str, dict[str, Any]] | None:
    """Combine mixed precision, checkpointing and 8-bit state, as far as the job does not use them already."""
    names = ("autocast", "checkpointing", "optimizer")
    chosen = [(change, options) for change, options in single if next(iter(options)) in names and "SGD" not in change]
    if len(chosen) < 2:
        return None
    merged = {name: value for _, options in chosen for name, value in options.items()}
    return " + ".join(change.partition(" (")[0] for change, _ in chosen), merged
