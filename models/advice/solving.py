"""Solves a job for the one value that is left open: a batch, a length, a LoRA rank, a number of GPUs, or a device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from vramcast.errors import UserError, check_choice
from vramcast.models.advice.unknowns import UNKNOWNS
from vramcast.models.advice.varied_answers import VariedAnswers
from vramcast.models.answer import FITS, Answer
from vramcast.models.value_search import LARGEST, largest_fitting, least_fitting
from vramcast.virtual_gpu.training.setup import TrainingSetup, call_text, parallel_text, parse_call

_START_LENGTH = 512
_LARGEST_RANK = 4096
_GPUS = (*range(2, 9), *range(16, 65, 8), *range(128, 1025, 64))
"""Numbers of GPUs that are tried: all of one node, then whole nodes of 8."""
_LONGEST = "the length that the network was made for is not checked: its positions may end earlier"


class SolvableAnswers(VariedAnswers, Protocol):
    """Answers for one job that also say what sequences of another length take."""

    def with_length(self, device: str, length: int) -> Answer:
        """Return the answer for sequences of another length."""


@dataclass(frozen=True)
class OpenJob:
    """A job with one value left open."""

    find: str
    device: str
    training: TrainingSetup
    """Of the job; the value that is left open is where the search starts."""
    devices: Sequence[Answer] = ()
    """The answers on all devices, to find one of them."""
    prices: Mapping[str, float] | None = None
    """The price of an hour of each device, as the operator wrote it."""
    longest: int | None = None
    """Positions of the network, if they are known."""


@dataclass(frozen=True)
class Solution:
    """The value that was found, with the answer for it; None if no value fits."""

    find: str
    value: int | str | None
    answer: Answer | None
    price: float | None = None
    """Of an hour of all GPUs, if the operator's table has it."""
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "status": "ok",
            "find": self.find,
            "value": self.value,
            "price_per_hour": self.price,
            "answer": self.answer.to_dict() if self.answer else None,
            "notes": list(self.notes),
        }


def solve(job: SolvableAnswers, problem: OpenJob) -> Solution:
    """Return the largest batch, length or rank, the least number of GPUs, or the cheapest device that fits safely."""
    check_choice("the value to find", problem.find, UNKNOWNS)
    solution = _SOLVERS[problem.find](job, problem)
    return replace(solution, price=_price(solution, problem))


def _batch(job: SolvableAnswers, problem: OpenJob) -> Solution:
    start = problem.training.batch_size

    def ask(size: int) -> Answer:
        return job.answer(problem.device, batch_size=size, last_batch_size=None)

    return _largest(problem, ask, start, LARGEST - 1)


def _length(job: SolvableAnswers, problem: OpenJob) -> Solution:
    most = problem.longest or LARGEST - 1
    solution = _largest(problem, lambda length: job.with_length(problem.device, length), min(_START_LENGTH, most), most)
    return solution if problem.longest else replace(solution, notes=(_LONGEST,))


def _rank(job: SolvableAnswers, problem: OpenJob) -> Solution:
    adapter = problem.training.adapter
    if adapter is None:
        raise UserError("expected an adapter with a rank, found none: give lora, as in lora=targets=all-linear")
    name, arguments = parse_call(adapter)

    def ask(rank: int) -> Answer:
        return job.answer(problem.device, adapter=call_text(name, {**arguments, "r": rank}))

    return _largest(problem, ask, int(arguments.get("r", 8)), _LARGEST_RANK)


def _gpus(job: SolvableAnswers, problem: OpenJob) -> Solution:
    parallelism = problem.training.parallelism
    if parallelism is None:
        raise UserError(
            "expected a strategy for several GPUs, found none: give parallel, as in parallel=fsdp2 with world_size=2"
        )
    options = parallelism.without_defaults()
    group = parallelism.nodes * parallelism.tensor * parallelism.pipeline
    if parallelism.strategy in ("tp", "pp"):
        group = parallelism.nodes

    def ask(count: int) -> Answer:
        return job.answer(
            problem.device, parallel=parallel_text(parallelism.strategy, {**options, "world_size": count})
        )

    counts = [count for count in _GPUS if count % group == 0]
    value, answer = least_fitting(ask, counts)
    return Solution(problem.find, value or None, answer)


def _device(_: SolvableAnswers, problem: OpenJob) -> Solution:
    """Return the cheapest device by the operator's prices; devices without a price come last, the smallest first."""
    prices = problem.prices or {}
    fitting = [answer for answer in problem.devices if answer.verdict == FITS]
    order = sorted(fitting, key=lambda item: (prices.get(item.device, float("inf")), item.capacity_mib, item.device))
    notes = () if prices else ("there is no table of prices: the device with the least memory is named",)
    return (
        Solution(problem.find, order[0].device, order[0], notes=notes) if order else Solution(problem.find, None, None)
    )


def _largest(problem: OpenJob, ask: Callable[[int], Answer], start: int, most: int) -> Solution:
    value, answer = largest_fitting(ask, start, ask(start), most)
    return Solution(problem.find, value or None, answer)


def _price(solution: Solution, problem: OpenJob) -> float | None:
    """Return the price of an hour of all GPUs of a solution."""
    answer, prices = solution.answer, problem.prices or {}
    if answer is None or answer.device not in prices:
        return None
    parallelism = TrainingSetup(batch_size=1, parallel=answer.parallel).parallelism if answer.parallel else None
    return prices[answer.device] * (parallelism.world_size if parallelism else 1)


_SOLVERS: Mapping[str, Callable[[SolvableAnswers, OpenJob], Solution]] = {
    "batch_size": _batch,
    "length": _length,
    "lora_rank": _rank,
    "world_size": _gpus,
    "device": _device,
}
