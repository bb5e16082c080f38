"""Suggestions that make a job fit, alone and combined, each simulated and estimated like the job itself."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any

from vramcast.errors import UserError
from vramcast.jobs.analysis.optimizers import OPTIMIZERS
from vramcast.jobs.optimizers import is_low_bit
from vramcast.models.advice.strategies import LORA, StrategyAnswer, first_guess, is_of_transformers
from vramcast.models.advice.varied_answers import VariedAnswers
from vramcast.models.answer import FITS, TIGHT, Answer
from vramcast.simulation.sandbox.failures import NetworkError
from vramcast.virtual_gpu.training.setup import TrainingSetup, parallel_text, parse_call

_MOST_GPUS = 16
_INSTALL = "pip install 'vramcast[finetuning]'"
_MISSING = f"LoRA and quantised weights could not be tried: {_INSTALL}, or name an interpreter with peft by --python"


@dataclass(frozen=True)
class Suggestion:
    """A change of the job, and the answer with it."""

    change: str
    answer: Answer


@dataclass(frozen=True)
class _Change:
    """A change of the training options: in words, and as options of the command line."""

    words: str
    flags: str
    options: Mapping[str, Any]

    def __add__(self, other: "_Change") -> "_Change":
        words, flags = f"{self.words} + {other.words}", f"{self.flags} {other.flags}"
        return _Change(words, flags, {**self.options, **other.options})

    def __str__(self) -> str:
        return f"{self.words} ({self.flags})"


@dataclass
class _Tried:
    """The changes that were tried, in the order of their cost."""

    job: VariedAnswers
    answer: Answer
    results: list[Suggestion] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """True if one of the changes makes the job fit."""
        return any(item.answer.verdict == FITS for item in self.results)

    def add(self, change: "_Change | None") -> bool:
        """Try a change, drop it if it does not help or the network does not support it; return whether it fits."""
        if change is None:
            return False
        with suppress(NetworkError):
            try:
                changed = self.job.answer(self.answer.device, **change.options)
            except UserError as error:
                self.notes += [_MISSING] if _INSTALL in str(error) and _MISSING not in self.notes else []
                return False
            if changed.estimate_mib < self.answer.estimate_mib:
                self.results.append(Suggestion(str(change), changed))
            return changed.verdict == FITS
        return False


def suggestions(
    job: VariedAnswers, answer: Answer, training: TrainingSetup, largest: Answer | None, devices: Sequence[Answer]
) -> tuple[list[Suggestion], tuple[str, ...]]:
    """Return changes that reduce the memory, and notes: those that fit come first, the least costly of them before."""
    tried = _Tried(job, answer)
    transformers = is_of_transformers(job.target)
    if largest is not None:
        size = largest.batch_size
        tried.results.append(Suggestion(f"a batch of {size} (--batch-size {size})", largest))
    if training.is_training:
        _try_training(tried, training, largest, transformers)
    else:
        for change in _smaller_inference(training):
            tried.add(change)
    return _with_device(tried, answer, devices)


def _with_device(tried: _Tried, answer: Answer, devices: Sequence[Answer]) -> tuple[list[Suggestion], tuple[str, ...]]:
    """Return the changes with a bigger device, those that fit first."""
    bigger = [item for item in devices if item.capacity_mib > answer.capacity_mib]
    chosen = next((item for verdict in (FITS, TIGHT) for item in bigger if item.verdict == verdict), None)
    if chosen:
        tried.results.append(Suggestion(f"a bigger device: {chosen.device}", chosen))
    order = {FITS: 0, TIGHT: 1}
    return sorted(tried.results, key=lambda item: order.get(item.answer.verdict, 2)), tuple(tried.notes)


def _smaller_inference(training: TrainingSetup) -> Iterator[_Change]:
    """Yield changes of a run without training: fewer bits of its weights."""
    if training.dtype == "fp32":
        yield _BF16
    if training.quantize is None:
        yield _NF4


def _try_training(tried: _Tried, training: TrainingSetup, largest: Answer | None, transformers: bool) -> None:
    answer = tried.answer
    parts = _parts(training, largest.batch_size if largest else 1)
    tried.add(parts)
    fused = _fused_loss(training) if transformers else ()
    for change in (
        *_same_training(training),
        *fused,
        *_other_optimizers(training, transformers),
        *_quantized(training),
    ):
        tried.add(change)
    held_mib = answer.breakdown_mib
    if not tried.fits and (training.adapter or 2 * held_mib.get("parameters", 0.0) < answer.capacity_mib):
        _climb(tried, _combined(training, parts))  # gradients alone take as much as parameters
    if not tried.fits and transformers and training.adapter is None:
        room = held_mib.get("parameters", 0.0) + held_mib.get("activations", 0.0) < answer.capacity_mib
        _climb(tried, _adapters(training, parts, without_checkpointing=room))
    if transformers and training.adapter is None:
        tried.results += _sharded(tried, training)


def _climb(tried: _Tried, ladder: Iterator[_Change]) -> None:
    """Try changes in the order of their cost until one fits."""
    for change in ladder:
        if tried.add(change):
            return


def _parts(training: TrainingSetup, largest: int) -> _Change | None:
    """Divide a batch into parts that fit, whose gradients are accumulated."""
    size = training.batch_size
    parts = next((n for n in range(2, size + 1) if size % n == 0 and size // n <= largest), None)
    if parts is None:
        return None
    words = f"the same batch in {parts} parts of {size // parts} by gradient accumulation"
    accumulate = parts * training.accumulate
    flags = f"--batch-size {size // parts} --accumulate {accumulate}"
    return _Change(words, flags, {"batch_size": size // parts, "accumulate": accumulate, "last_batch_size": None})


_CHECKPOINTING = _Change("activation checkpointing", "--checkpointing", {"checkpointing": True})
_AUTOCAST = _Change("mixed precision", "--autocast bf16", {"autocast": "bf16"})
_BF16 = _Change("all in bf16", "--dtype bf16", {"dtype": "bf16", "autocast": None})
_LOW_BITS = _Change("optimizer state in 8 bits", "--optimizer adamw8bit", {"optimizer": "adamw8bit"})
_LIGER = _Change("Liger's kernels, with a fused loss", "--liger", {"liger": True})
_SGD = _Change("SGD without momentum", "--optimizer sgd", {"optimizer": "sgd"})
_FUSED = _Change("a fused optimizer", "--implementation fused", {"implementation": "fused"})
_LORA = _Change("LoRA on all linear layers", "--lora r=16,targets=all-linear", {"adapter": LORA})
_NF4 = _Change("base in 4 bits", "--quantize nf4", {"quantize": "nf4"})


def _same_training(training: TrainingSetup) -> Iterator[_Change]:
    """Yield changes after which the same parameters are trained in the same way, or nearly."""
    rule = OPTIMIZERS.get(parse_call(training.optimizer)[0])
    if rule and rule.fused and training.implementation == "default" and training.adapter is None:
        yield _FUSED
    if training.autocast is None and training.dtype == "fp32":
        yield _AUTOCAST
        yield _BF16
    if not training.checkpointing:
        yield _CHECKPOINTING


def _fused_loss(training: TrainingSetup) -> Iterator[_Change]:
    """Yield Liger's kernels, which are dropped where the library or a kernel for the network is missing."""
    if not training.liger and training.loss_form == "default" and training.implementation != "in_backward":
        yield _LIGER


def _has_lean_optimizer(training: TrainingSetup) -> bool:
    name = parse_call(training.optimizer)[0]
    return name in ("SGD", "Adafactor") or is_low_bit(name) or training.adapter is not None


def _other_optimizers(training: TrainingSetup, transformers: bool) -> Iterator[_Change]:
    if not _has_lean_optimizer(training):
        yield _LOW_BITS
        if not transformers:
            yield _SGD


def _quantized(training: TrainingSetup) -> Iterator[_Change]:
    if training.adapter is not None and training.quantize is None:
        yield _NF4


def _combined(training: TrainingSetup, parts: _Change | None) -> Iterator[_Change]:
    """Yield combinations of what the job does not use yet, the least costly first."""
    common = [] if training.checkpointing else [_CHECKPOINTING]
    common += [] if _has_lean_optimizer(training) else [_LOW_BITS]
    common += list(_quantized(training))
    precisions = [_AUTOCAST, _BF16] if training.autocast is None and training.dtype == "fp32" else []
    stages = [[precision, *common] for precision in precisions] or [common]
    if parts is not None:
        stages.append([*stages[-1], parts])
    for stage in stages:
        if len(stage) > 1:
            yield _sum(stage)


def _adapters(training: TrainingSetup, parts: _Change | None, without_checkpointing: bool) -> Iterator[_Change]:
    """Yield LoRA, then LoRA with more and more of the other changes."""
    start = [_BF16, _LORA] if training.dtype == "fp32" else [_LORA]
    recomputing = start if training.checkpointing else [*start, _CHECKPOINTING]
    stages = [start, recomputing] if without_checkpointing and recomputing is not start else [recomputing]
    stages.append([*stages[-1], _NF4])
    if parts is not None:
        stages.append([*stages[-1], parts])
    yield from map(_sum, stages)


def _sum(changes: Sequence[_Change]) -> _Change:
    return reduce(add, changes)


def _sharded(tried: _Tried, training: TrainingSetup) -> Iterator[Suggestion]:
    """Yield FSDP2 with checkpointing over the least power of two of these GPUs that fits, if a few are enough."""
    base = None if training.checkpointing else _CHECKPOINTING
    alone = next((item.answer for item in tried.results if base and item.change == str(base)), tried.answer)
    size = first_guess(StrategyAnswer("FSDP2", 1, alone))
    for count in (size, 2 * size):
        if not 1 < count <= _MOST_GPUS:
            return
        words = f"FSDP2 over {count} of these GPUs, each with this batch"
        options = {"parallel": parallel_text("fsdp2", {"world_size": count})}
        change = _Change(words, f"--parallel fsdp2 --world-size {count}", options)
        with suppress(UserError, NetworkError):
            answer = tried.job.answer(tried.answer.device, **(change + base if base else change).options)
            if answer.verdict == FITS:
                yield Suggestion(str(change + base if base else change), answer)
                return
