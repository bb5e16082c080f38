"""`vramcast simulate`: runs a trace of jobs on shared GPUs under several estimators."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from vramcast.collocation.cluster_simulation.comparison import EstimatorResult, compare, text_table
from vramcast.collocation.cluster_simulation.gantt_table import gantt_table
from vramcast.collocation.cluster_simulation.needs import ESTIMATORS, FLOOR_MIB, OURS, NeedRules, estimators_of
from vramcast.collocation.cluster_simulation.rules import LEDGERS, QUEUES, ClusterRules
from vramcast.collocation.cluster_simulation.workload import TraceJob, read_jobs, read_trace
from vramcast.collocation.placement import POLICIES
from vramcast.commands.exit_codes import exit_code
from vramcast.defaults import CHECKPOINT, RISK
from vramcast.device.profiles import DEFAULT_DEVICE, load_profile
from vramcast.errors import check_amount, check_count
from vramcast.models.timeline import check_picture


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the return value is the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return exit_code("vramcast simulate", lambda: _simulate(make_parser().parse_args(words)))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    rules = {item.name: item.default for item in fields(ClusterRules)}
    parser = argparse.ArgumentParser(prog="vramcast simulate", description=__doc__)
    add = parser.add_argument
    add("--jobs", required=True, metavar="FILE", help="a table of jobs: peak, GPUs, solo seconds, published estimates")
    add("--trace", required=True, metavar="FILE", help="arrivals: arrival_s, job")
    add("--estimator", default="all", metavar="NAMES", help=f"of {', '.join(ESTIMATORS)}, with commas, or all")
    add("--gpus", type=int, default=rules["gpus"])
    add("--device", default=DEFAULT_DEVICE, help="a device profile")
    add("--policy", default=rules["policy"], choices=POLICIES)
    add("--queue", default=rules["queue"], choices=QUEUES, help="with backfill, jobs overtake one that finds no place")
    add(
        "--ledger",
        default=rules["ledger"],
        choices=LEDGERS,
        help="what counts as taken: reservations, or observed memory",
    )
    add("--remember", action="store_true", help="a job that ran before needs its observed peak and a margin")
    add("--slowdown", type=float, default=rules["slowdown"], help="cost of each other job on the same GPU")
    add("--peak-after-s", type=float, default=rules["peak_after_s"], help="from a job's start to its peak")
    add("--retry-after-s", type=float, default=rules["retry_after_s"], help="from a crash to being queued again")
    add("--margin-mib", type=int, default=0, help="added to point estimates (CARMA: 2048), not to bounds")
    add("--floor-mib", type=int, default=FLOOR_MIB, help="free memory that a job needs without an estimator")
    add("--repeats", type=int, default=1, help="means over the trace and copies of it with shifted arrivals")
    add("--jitter-s", type=float, default=60.0, help="the largest shift of an arrival")
    add("--checkpoint", default=CHECKPOINT, metavar="NAME", help="of ours: a released estimator, or its directory")
    add("--risk", type=float, default=RISK, help="of ours: the share of jobs that may need more than their bound")
    add("--bucket-mib", type=int, default=1, help="of ours: bounds are rounded up to a multiple")
    add("--definitions", metavar="FILE", help="of ours: which recipe defines which job")
    add("--cache", metavar="DIR", help="of ours: directory of simulations; default: the user's cache")
    add("--workers", type=int, default=2, help="of ours: processes that simulate networks")
    add("--gantt", metavar="FILE", help="draw a Gantt chart (PNG or SVG)")
    add("--json", action="store_true")
    return parser


def _simulate(arguments: argparse.Namespace) -> None:
    estimators = estimators_of(arguments.estimator)
    check_count("--repeats", arguments.repeats)
    check_amount("--jitter-s", arguments.jitter_s)
    if arguments.gantt:
        check_picture(Path(arguments.gantt))
    trace = read_trace(Path(arguments.trace), read_jobs(Path(arguments.jobs)))
    jobs = list({item.job.name: item.job for item in trace}.values())
    rules = _rules(arguments)
    need_rules = NeedRules(rules.capacity_bytes, arguments.margin_mib, arguments.floor_mib)
    bounds = _bounds(arguments, jobs) if OURS in estimators else None
    needs = {name: need_rules.needs_bytes(name, jobs, bounds) for name in estimators}
    outcomes = compare(trace, needs, rules, arguments.repeats, arguments.jitter_s)
    if arguments.gantt:
        _draw(arguments, outcomes, rules)
    _print(arguments, outcomes)


def _rules(arguments: argparse.Namespace) -> ClusterRules:
    profile = load_profile(arguments.device)
    named = {item.name: getattr(arguments, item.name) for item in fields(ClusterRules) if hasattr(arguments, item.name)}
    return ClusterRules(**named, capacity_bytes=profile.available_bytes)


def _bounds(arguments: argparse.Namespace, jobs: Sequence[TraceJob]) -> dict[str, int]:
    from vramcast.collocation.cluster_simulation.ours import DEFINITIONS, AnswerSettings, bounds_bytes
    from vramcast.dataset_builder.simulation_store import SimulationStore

    check_count("--workers", arguments.workers)
    settings = AnswerSettings(arguments.checkpoint, arguments.risk, arguments.bucket_mib)
    definitions = Path(arguments.definitions) if arguments.definitions else DEFINITIONS
    cache = SimulationStore(arguments.cache, arguments.workers)
    return bounds_bytes(jobs, arguments.device, settings, cache, definitions)


def _draw(arguments: argparse.Namespace, outcomes: Mapping[str, EstimatorResult], rules: ClusterRules) -> None:
    from vramcast.collocation.cluster_simulation.gantt_drawing import draw_gantt

    title = f"{Path(arguments.trace).stem} on {rules.gpus} x {arguments.device}, {rules.policy}, simulated"
    charts = {name: gantt_table(outcome.runs) for name, outcome in outcomes.items()}
    draw_gantt(charts, rules.capacity_bytes, title, Path(arguments.gantt))


def _print(arguments: argparse.Namespace, outcomes: Mapping[str, EstimatorResult]) -> None:
    names = ("gpus", "device", "policy", "queue", "ledger", "remember", "slowdown", "margin_mib", "risk", "repeats")
    settings = {name: getattr(arguments, name) for name in names}
    if not arguments.json:
        print(text_table(outcomes))
        return
    results: dict[str, Any] = {name: outcome.to_json() for name, outcome in outcomes.items()}
    if len(results) == 1:
        ((name, figures),) = results.items()
        print(json.dumps({"estimator": name, **figures, **settings}, allow_nan=False))
    else:
        print(json.dumps({"estimators": results, **settings}, allow_nan=False))
