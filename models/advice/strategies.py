"""Strategies for several GPUs beside each other: what fits, and the least number of GPUs that fits, and how."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from vramcast.errors import UserError
from vramcast.models.advice.varied_answers import VariedAnswers
from vramcast.models.answer import FITS, Answer
from vramcast.simulation.sandbox.failures import NetworkError
from vramcast.virtual_gpu.training.setup import TrainingSetup, parallel_text

_MOST_GPUS = 1024
LORA = "lora(r=16, target_modules='all-linear')"
_TRIES = 3
"""Numbers of GPUs that are simulated for each strategy, after the first guess."""
_SHARDED_USES = ("parameters", "gradients", "optimizer_state")


@dataclass(frozen=True)
class StrategyAnswer:
    """A strategy, and the answer with it."""

    change: str
    world_size: int
    answer: Answer
    smallest: bool = False
    """True for the least number of GPUs that fits."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "strategy": self.change,
            "parallel": self.answer.parallel,
            "world_size": self.world_size,
            "estimate_mib": self.answer.estimate_mib,
            "safe_mib": self.answer.safe_mib,
            "verdict": self.answer.verdict,
            "smallest": self.smallest,
        }


def strategy_answers(job: VariedAnswers, answer: Answer, training: TrainingSetup) -> list[StrategyAnswer]:
    """Return the answers of the usual strategies on the same GPUs, then the least number of GPUs that fits."""
    parallelism = training.parallelism
    if parallelism is None:
        return []
    size, nodes = parallelism.world_size, parallelism.nodes
    results = [
        StrategyAnswer(change, size, result)
        for change, options in _variants(size, nodes, bool(training.checkpointing), _has_adapters(job, training))
        for result in _answered(job, answer.device, options)
    ]
    smallest = min(_smallest(job, answer.device, results), key=lambda item: item.world_size, default=None)
    return [*results, smallest] if smallest else results


def is_of_transformers(target: str) -> bool:
    """Return whether a target names a network that adapters are made for."""
    return target.startswith("hf:")


def _has_adapters(job: VariedAnswers, training: TrainingSetup) -> bool:
    return is_of_transformers(job.target) and training.adapter is None


def _variants(size: int, nodes: int, checkpointing: bool, adapters: bool) -> Iterator[tuple[str, Mapping[str, Any]]]:
    common = {"world_size": size, "nodes": nodes}
    sharded, offloaded = parallel_text("fsdp2", common), parallel_text("fsdp2", {**common, "offload": True})
    yield "DDP", {"parallel": parallel_text("ddp", common)}
    yield "ZeRO-1", {"parallel": parallel_text("zero1", common)}
    yield "FSDP2", {"parallel": sharded}
    if not checkpointing:
        yield "FSDP2 + checkpointing", {"parallel": sharded, "checkpointing": True}
    yield "FSDP2 + offload", {"parallel": offloaded}
    if not checkpointing:
        yield "FSDP2 + checkpointing + offload", {"parallel": offloaded, "checkpointing": True}
    if adapters:
        lora = {"adapter": LORA, "checkpointing": True}
        yield "DDP + LoRA + checkpointing", {"parallel": parallel_text("ddp", common), **lora}
        yield "FSDP2 + LoRA + checkpointing", {"parallel": sharded, **lora}


def _answered(job: VariedAnswers, device: str, options: Mapping[str, Any]) -> Iterator[Answer]:
    """Yield the answer, unless the network does not support the strategy."""
    with suppress(UserError, NetworkError):
        yield job.answer(device, **options)


def _smallest(job: VariedAnswers, device: str, results: list[StrategyAnswer]) -> Iterator[StrategyAnswer]:
    """Yield the least power of two of GPUs that fits, for each sharded strategy in the order of its cost.

    The peak of a sharded strategy is about a constant and a part in proportion to 1 / GPUs. That gives a first guess,
    which is simulated and raised until it fits.
    """
    for result in results:
        if not result.change.startswith("FSDP2") or "offload" in result.change or "LoRA" in result.change:
            continue
        checkpointing = {"checkpointing": True} if "checkpointing" in result.change else {}
        size = first_guess(result)
        for _ in range(_TRIES):
            if size > _MOST_GPUS:
                break
            parallel = parallel_text("fsdp2", {"world_size": size}) if size > 1 else None
            change = result.change if size > 1 else result.change.replace("FSDP2", "no parallelism")
            for fitting in _answered(job, device, {"parallel": parallel, **checkpointing}):
                if fitting.verdict == FITS:
                    yield StrategyAnswer(change, size, fitting, smallest=True)
                    break
            else:
                size *= 2
                continue
            break


def first_guess(result: StrategyAnswer) -> int:
    """Return a power of two of GPUs that may be enough, by the parts of the memory that are sharded."""
    sharded = sum(result.answer.breakdown_mib.get(use, 0.0) for use in _SHARDED_USES)
    size = 1
    while size < _MOST_GPUS:
        if result.answer.safe_mib + sharded * (result.world_size / size - 1) <= result.answer.capacity_mib:
            break
        size *= 2
    return size
