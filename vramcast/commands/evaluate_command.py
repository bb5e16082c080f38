"""`vramcast evaluate`: compare the estimates of a backend or a checkpoint with a table of measurements."""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from vramcast.commands.exit_codes import CommandParser, exit_code
from vramcast.dataset_builder.rows import Row
from vramcast.dataset_builder.simulation_store import SimulationStore
from vramcast.dataset_builder.store.importers import read_rows
from vramcast.dataset_builder.store.splits import HALVES, SPLIT_BY, in_half
from vramcast.defaults import BUCKET_MIB, RISK
from vramcast.errors import UserError, check_count
from vramcast.models.evaluation import BACKENDS, Evaluation, EvaluationSettings, evaluate, load_estimators


def main(argv: Sequence[str]) -> int:
    """Run `vramcast evaluate` and return the exit code."""
    return exit_code("vramcast evaluate", lambda: _evaluate(argv))


def _evaluate(argv: Sequence[str]) -> None:
    arguments = make_parser().parse_args(argv)
    check_count("--bucket-mib", arguments.bucket_mib)
    check_count("--workers", arguments.workers)
    check_count("--worst", arguments.worst, least=0)
    if arguments.rows is not None:
        check_count("--rows", arguments.rows)
    measured = read_rows(Path(arguments.data))
    rows = [row for row in measured if in_half(row.spec, arguments.half, arguments.half_by)][: arguments.rows]
    if not rows:
        raise UserError(f"expected measured rows in {arguments.data}, found none: name another file")
    evaluation = _evaluation(arguments, rows)
    print(json.dumps(evaluation.to_json(), allow_nan=False) if arguments.json else evaluation.to_text())


def _evaluation(arguments: argparse.Namespace, rows: Sequence[Row]) -> Evaluation:
    settings = EvaluationSettings(arguments.bucket_mib, arguments.device, arguments.risk, arguments.worst)
    store = SimulationStore(arguments.cache, arguments.workers)
    if arguments.checkpoint is None:
        return evaluate(arguments.backend, BACKENDS[arguments.backend], {}, rows, settings, store)
    from vramcast.models.baselines.fake_tensor import FakeTensor, read_published  # noqa: PLC0415

    estimator, baselines = load_estimators(arguments.checkpoint)
    published = {FakeTensor.name: FakeTensor(read_published(Path(arguments.data)))}
    return evaluate(arguments.checkpoint, estimator, {**baselines, **published}, rows, settings, store)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = CommandParser(prog="vramcast evaluate", description=__doc__)
    estimator = parser.add_mutually_exclusive_group()
    estimator.add_argument("--backend", default="virtual", choices=list(BACKENDS))
    estimator.add_argument("--checkpoint", metavar="NAME", help="a trained estimator, its directory or released name")
    parser.add_argument("--data", required=True, metavar="FILE", help="a public table of measurements")
    parser.add_argument("--device", help="a device profile for all rows; default: the one of each row")
    parser.add_argument("--bucket-mib", type=int, default=BUCKET_MIB, help="the width of a bucket")
    parser.add_argument("--rows", type=int, help="only the first N rows")
    parser.add_argument("--half", choices=list(HALVES), help="of the networks: profiles are calibrated on even ones")
    parser.add_argument(
        "--half-by", choices=list(SPLIT_BY), default=SPLIT_BY[0],
        help="what a half is of: of the networks, or of the configurations of network and training",
    )  # fmt: skip
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--worst", type=int, default=0, help="show the rows with the largest errors")
    parser.add_argument(
        "--risk", type=float, help=f"of a checkpoint: probability that a bound is too low; default {RISK} or its least"
    )
    parser.add_argument("--cache", metavar="DIR", help="directory of simulations; default: the user's cache")
    parser.add_argument("--json", action="store_true")
    return parser
