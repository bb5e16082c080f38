"""Compare published fine-tuning runs with their simulation: `python -m benchmarks.published --data FILE`.

Each run is simulated with the libraries of its time, from the environments that `make stacks` creates.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from benchmarks.published.evaluation import PublishedStore, evaluate_published, published_text
from benchmarks.published.stacks import ROOT
from benchmarks.published.tables import read_published
from vramcast.commands.exit_codes import CommandParser, exit_code
from vramcast.errors import check_count


def main(argv: list[str]) -> int:
    """Evaluate a table and return the exit code."""
    return exit_code("benchmarks.published", lambda: _evaluate(argv))


def _evaluate(argv: list[str]) -> None:
    arguments = _parser().parse_args(argv)
    check_count("--workers", arguments.workers)
    check_count("--worst", arguments.worst, least=0)
    if arguments.rows is not None:
        check_count("--rows", arguments.rows)
    store = PublishedStore(arguments.cache, arguments.stacks)
    table = read_published(arguments.data)
    figures = evaluate_published(table, store, arguments.rows, arguments.worst, arguments.workers)
    print(json.dumps({"data": arguments.data.name, **figures}) if arguments.json else published_text(figures))


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="python -m benchmarks.published", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="a table of published runs")
    parser.add_argument("--rows", type=int, help="only the first N jobs")
    parser.add_argument("--worst", type=int, default=0, help="show the jobs with the largest errors")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cache", metavar="DIR", help="directory of simulations; default: the user's cache")
    parser.add_argument("--stacks", type=Path, default=ROOT, metavar="DIR", help="the environments of make stacks")
    parser.add_argument("--json", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
