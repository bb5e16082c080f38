"""`vramcast check`: fail if a job does not fit its device, takes more than a limit, or more than it took before."""

import argparse
import io
import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from vramcast.commands.check.baseline import Baseline
from vramcast.commands.exit_codes import FAILED, CommandParser, exit_code
from vramcast.errors import UserError, check_amount
from vramcast.models.answer import FITS
from vramcast.models.json_figures import rounded

_USAGE = """\
vramcast check [options] TARGET [options of vramcast classify]
       vramcast check [options] [options of vramcast run] -- COMMAND"""
_EPILOG = "exit codes: 0 passed, 1 failed, 2 bad input, 3 the script or the network's code failed"


@dataclass(frozen=True)
class Check:
    """One job with its answer, and the limits that it is held against."""

    job: str
    answer: Mapping[str, Any]
    max_mib: float | None = None
    baseline_mib: float | None = None
    tolerated: float = 0.0
    """The part of the baseline by which the safe figure may have grown."""

    @property
    def safe_mib(self) -> float:
        """Return the memory to reserve."""
        return float(self.answer["safe_mib"])

    @property
    def growth(self) -> float | None:
        """Return the change since the baseline, as a part of it."""
        return self.safe_mib / self.baseline_mib - 1 if self.baseline_mib else None

    @property
    def failures(self) -> tuple[str, ...]:
        """Return why the check fails, each reason in words; none if it passes."""
        reasons = []
        if self.answer["verdict"] != FITS:
            reasons.append(f"{self.answer['verdict']}: {self.answer['device']} has {_mib(self.answer['capacity_mib'])}")
        if self.max_mib is not None and self.safe_mib > self.max_mib:
            reasons.append(f"above the limit of {_mib(self.max_mib)}")
        if self.growth is not None and self.growth > self.tolerated:
            reasons.append(f"grew by {self.growth:.1%}, more than the {self.tolerated:.1%} that is tolerated")
        return tuple(reasons)

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain values, with the answer of `classify` or `run`."""
        values = {
            "job": self.job,
            "passed": not self.failures,
            "failures": list(self.failures),
            "safe_mib": self.safe_mib,
            "max_mib": self.max_mib,
            "baseline_mib": self.baseline_mib,
            "growth": self.growth,
        }
        return {**rounded(values), "answer": self.answer}

    def __str__(self) -> str:
        answer = self.answer
        figures = f"safe {_mib(self.safe_mib)} of {_mib(answer['capacity_mib'])} on {answer['device']}"
        if self.growth is not None and self.baseline_mib is not None:
            figures += f", baseline {_mib(self.baseline_mib)} ({self.growth:+.1%})"
        lines = [f"{'failed' if self.failures else 'passed'}  {self.job}: {figures}"]
        return "\n".join([*lines, *(f"        {reason}" for reason in self.failures)])


def _mib(value: float) -> str:
    return f"{value:,.0f} MiB"


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    return exit_code("vramcast check", lambda: _check(list(argv)))


def make_parser() -> CommandParser:
    """Return the parser of the command's own options."""
    parser = CommandParser(
        prog="vramcast check",
        usage=_USAGE,
        description=__doc__,
        epilog=_EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--max-mib", type=float, metavar="N", help="fail if the safe figure is above N MiB")
    parser.add_argument("--baseline", type=Path, metavar="FILE", help="fail if the safe figure is above that of a file")
    parser.add_argument("--write-baseline", action="store_true", help="write the figures to that file")
    parser.add_argument(
        "--tolerate",
        type=float,
        default=0.01,
        metavar="F",
        help="growth that does not fail; default 0.01, or 1 %%",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, with the whole answer")
    return parser


def _check(argv: list[str]) -> int:
    own, command = (argv[: argv.index("--")], argv[argv.index("--") :]) if "--" in argv else (argv, [])
    arguments, others = make_parser().parse_known_args(own)
    words = [*others, *command]
    _check_options(arguments, words)
    job = shlex.join([*others, *command[1:]])
    baseline = None
    if arguments.baseline:  # a damaged file fails before the job starts
        baseline = Baseline.read(arguments.baseline, may_be_absent=arguments.write_baseline)
    before = baseline.safe_mib(job) if baseline and not arguments.write_baseline else None
    code, answer = _answer("run" if command else "classify", words)
    if answer is None:
        return code or FAILED
    check = Check(job, answer, arguments.max_mib, before, arguments.tolerate)
    if baseline and arguments.write_baseline:
        baseline.write(job, answer)
    print(json.dumps(check.to_json(), allow_nan=False) if arguments.json else check)
    return code or (FAILED if check.failures else 0)


def _check_options(arguments: argparse.Namespace, words: Sequence[str]) -> None:
    if arguments.max_mib is not None:
        check_amount("--max-mib", arguments.max_mib, zero=False)
    check_amount("--tolerate", arguments.tolerate)
    if arguments.write_baseline and not arguments.baseline:
        raise UserError("expected --baseline FILE beside --write-baseline, found none: name the file")
    if not words:
        raise UserError("expected a target, or a command after '--', found none: name what is to be checked")
    if any(word.partition("=")[0] == "--jobs" for word in words):
        raise UserError("expected one job, found --jobs: run vramcast check for each, with one baseline file")


def _answer(command: str, words: Sequence[str]) -> tuple[int, Mapping[str, Any] | None]:
    """Run another command; return its exit code, and its answer if it printed one."""
    module = import_module(f"vramcast.commands.{command}.{command}_command")
    printed = io.StringIO()
    with redirect_stdout(printed):
        code: int = module.main(["--json", *words])
    lines = printed.getvalue().splitlines()
    return code, json.loads(lines[-1]) if lines and lines[-1].startswith("{") else None
