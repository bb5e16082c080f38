"""What would make a job fit: each suggestion is simulated and estimated like the job itself."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from vramcast.dataset_builder.simulation.client import TheirError
from vramcast.errors import UserError
from vramcast.models.answer import FITS, TIGHT, Answer
from vramcast.models.answering.conversation import Conversation
from vramcast.virtual_gpu.training_setup import TrainingSetup, parse_call

_LEAN = ("SGD", "Adafactor", "Adam8bit", "AdamW8bit")
"""Optimizers that keep little; to their users no leaner one is suggested."""


@dataclass(frozen=True)
class Suggestion:
    """A change of the job, and what it would then take."""

    change: str
    answer: Answer


def advice(
    talk: Conversation, answer: Answer, training: TrainingSetup, largest: Answer | None, cards: Sequence[Answer]
) -> list[Suggestion]:
    """Changes in the order of what they cost: none of them is shown without its figure."""
    found = list(_smaller(talk, answer, training, largest))
    single = [*_precision(training), *_recomputing(training), *_optimizers(training)]
    for change, wishes in single:
        found += _asked(talk, answer, change, wishes)
    together = _together(single)
    if together and not any(item.answer.verdict == FITS for item in found):
        found += _asked(talk, answer, *together)
    bigger = [card for card in cards if card.capacity_mib > answer.capacity_mib]
    chosen = next((card for verdict in (FITS, TIGHT) for card in bigger if card.verdict == verdict), None)
    if chosen:
        found.append(Suggestion(f"a bigger card: {chosen.device}", chosen))
    return found


def _asked(talk: Conversation, answer: Answer, change: str, wishes: Mapping[str, Any]) -> Iterator[Suggestion]:
    """Where a network does not lend itself to a change, or takes no less with it, the change is not suggested."""
    with suppress(UserError, TheirError):
        found = talk.answer(answer.device, **wishes)
        if found.estimate_mib < answer.estimate_mib:
            yield Suggestion(change, found)


def _smaller(
    talk: Conversation, answer: Answer, training: TrainingSetup, largest: Answer | None
) -> Iterator[Suggestion]:
    if largest is None:
        if training.batch_size > 1:
            yield from _asked(talk, answer, "a batch of 1", {"batch_size": 1})
        return
    yield Suggestion(f"a batch of {largest.batch_size}", largest)
    size = training.batch_size
    parts = next((n for n in range(2, size + 1) if size % n == 0 and size // n <= largest.batch_size), None)
    if parts:
        change = f"the same batch in {parts} parts of {size // parts} (gradient accumulation)"
        wishes = {"batch_size": size // parts, "accumulate": parts * training.accumulate}
        yield from _asked(talk, answer, change, wishes)


def _precision(training: TrainingSetup) -> Iterator[tuple[str, dict[str, Any]]]:
    if training.autocast is None and training.dtype == "fp32":
        yield "mixed precision (--autocast bf16)", {"autocast": "bf16"}
        yield "all in bf16 (--dtype bf16)", {"dtype": "bf16"}


def _recomputing(training: TrainingSetup) -> Iterator[tuple[str, dict[str, Any]]]:
    if not training.checkpointing:
        yield "activation checkpointing (--checkpointing)", {"checkpointing": True}


def _optimizers(training: TrainingSetup) -> Iterator[tuple[str, dict[str, Any]]]:
    if parse_call(training.optimizer)[0] not in _LEAN:
        yield "optimizer state in 8 bits (--optimizer adamw8bit)", {"optimizer": "adamw8bit"}
        yield "SGD without momentum (--optimizer sgd)", {"optimizer": "sgd"}


def _together(single: Sequence[tuple[str, dict[str, Any]]]) -> tuple[str, dict[str, Any]] | None:
    """Mixed precision, checkpointing and 8-bit state at once, as far as they are not there already."""
    wanted = ("autocast", "checkpointing", "optimizer")
    chosen = [(change, wishes) for change, wishes in single if next(iter(wishes)) in wanted and "SGD" not in change]
    if len(chosen) < 2:
        return None
    merged = {name: value for _, wishes in chosen for name, value in wishes.items()}
    return " + ".join(change.partition(" (")[0] for change, _ in chosen), merged
