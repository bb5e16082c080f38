"""`vramcast solve`: the largest batch, length or rank, the least number of GPUs, or the cheapest device that fits."""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramcast.collocation.prices import read_prices
from vramcast.commands.classify.classify_command import add_job, progress, values_of, with_simulators, with_target
from vramcast.commands.classify.request import ClassifyRequest
from vramcast.commands.classify.simulators import Simulators
from vramcast.commands.exit_codes import FAILED, CommandParser, exit_code
from vramcast.errors import UserError, check_choice
from vramcast.jobs.architectures import positions_of
from vramcast.jobs.network_files.description import NetworkDescription
from vramcast.jobs.targets import FORMS
from vramcast.models.advice.unknowns import UNKNOWNS
from vramcast.quick_imports import quick_imports

if TYPE_CHECKING:  # the child starts before this process imports torch
    from vramcast.models.advice.solving import Solution

_STARTS: dict[str, dict[str, Any]] = {"batch_size": {"batch_size": 8}, "world_size": {"world_size": 2}}
"""Where a search starts if the value is not given."""
_WORDS = {
    "batch_size": "the largest batch",
    "length": "the longest sequence",
    "lora_rank": "the largest rank of LoRA",
    "world_size": "the least number of GPUs",
    "device": "the cheapest device",
}


def main(argv: Sequence[str]) -> int:
    """Run `vramcast solve`; the exit code is 1 if no value fits."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return exit_code("vramcast solve", lambda: _solve(with_target(make_parser().parse_args(argv))))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = CommandParser(prog="vramcast solve", description=__doc__, epilog=f"TARGET is {FORMS}.")
    names = ", ".join(name.replace("_", "-") for name in UNKNOWNS)
    parser.add_argument("--find", required=True, metavar="NAME", help=f"the value that is left open: {names}")
    parser.add_argument("--prices", type=Path, metavar="FILE", help="YAML: the price of an hour of each device")
    add_job(parser)
    return parser


def _solve(arguments: argparse.Namespace) -> int:
    find = arguments.find.replace("-", "_")
    check_choice("--find", find, UNKNOWNS)
    if arguments.target is None:
        raise UserError(f"expected {FORMS}, found no target: name the network")
    prices = read_prices(arguments.prices)
    values = values_of(arguments)
    starts = {name: value for name, value in _STARTS.get(find, {}).items() if values.get(name) is None}
    request = ClassifyRequest.of({**values, **starts})

    def work(simulators: Simulators) -> int:
        with progress(request.target):
            solution = _solution(find, request, simulators, arguments.checkpoint, prices)
        print(json.dumps(solution.to_dict(), allow_nan=False) if arguments.json else _text(solution, request))
        return 0 if solution.answer else FAILED

    return with_simulators("vramcast solve", arguments, work)


def _solution(
    find: str, request: ClassifyRequest, simulators: Simulators, checkpoint: str, prices: dict[str, float]
) -> "Solution":
    subject = simulators.start(request)
    with quick_imports():  # here, because the child builds the network while this process imports torch
        from vramcast.commands.classify.job_answers import JobAnswers  # noqa: PLC0415
        from vramcast.device.profiles import gpu_profiles  # noqa: PLC0415
        from vramcast.models.advice.solving import OpenJob, solve  # noqa: PLC0415
        from vramcast.models.answer import Answer  # noqa: PLC0415
        from vramcast.models.predictor import Predictor  # noqa: PLC0415

    if isinstance(subject, NetworkDescription):
        raise UserError("expected a network to solve for, found its layers alone: name the network itself")
    predictor = Predictor.load(checkpoint)

    class Solvable(JobAnswers):
        """Answers of the child process, which builds the network again for another length."""

        def with_length(self, device: str, length: int) -> Answer:
            other = replace(request, input=(str(length),))
            longer: Any = simulators.start(other)  # never a layer table, as the first was none
            return JobAnswers(other, longer, predictor).answer(device)

    job = Solvable(request, subject, predictor)
    names = [profile.name for profile in gpu_profiles()] if find == "device" else [request.device]
    simulation = job.simulate(names)
    answers = job.answers(simulation, names)
    longest = positions_of(request.target)
    return solve(job, OpenJob(find, request.device, simulation.training, answers, prices, longest))


def _text(solution: "Solution", request: ClassifyRequest) -> str:
    """Return the solution in a few lines."""
    words = _WORDS[solution.find]
    if solution.answer is None:
        where = "any device" if solution.find == "device" else request.device
        return f"{request.target}: no value fits {where} safely ({words})"
    lines = [f"{request.target}: {words} that fits safely is {solution.value}", str(solution.answer)]
    if solution.price is not None:
        lines.append(f"  price      {solution.price:g} an hour")
    return "\n".join([*lines, *(f"  note       {note}" for note in solution.notes)])
