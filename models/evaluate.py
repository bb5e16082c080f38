"""`vramcast evaluate`: the estimates of a backend or a checkpoint against a table of measurements."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from dataset_builder.configuration import load_device, make_backend
from dataset_builder.errors import UserError, check_count
from dataset_builder.executors import LocalExecutor
from dataset_builder.measure import Backend
from dataset_builder.schema import Row, Spec, Status
from dataset_builder.store.importers import read_rows
from models.metrics import Judged, Metrics, judge

MIB = 2**20


def evaluate_backend(
    backend: Backend, rows: Sequence[Row], bucket_mib: int, workers: int
) -> tuple[Metrics, list[Judged]]:
    """Estimate rows anew and compare. Those that died of anything but memory, or are censored, are excluded."""
    usable = {row.spec: row for row in rows if row.measurement.status in (Status.OK, Status.OOM)}
    judged = list(_judge_rows(backend, usable, workers))
    return judge(judged, bucket_mib, excluded=len(rows) - len(judged)), judged


def _judge_rows(backend: Backend, rows: dict[Spec, Row], workers: int) -> Iterator[Judged]:
    outcomes = LocalExecutor(workers, timeout_seconds=600).run(backend, rows)
    for spec, outcome in tqdm(outcomes, total=len(rows), unit="row", mininterval=0.1 if sys.stderr.isatty() else 5):
        if outcome.measurement.status not in (Status.OK, Status.OOM):
            print(f"note: {spec.id} was not estimated: {outcome.measurement.evidence}", file=sys.stderr)
            continue
        estimate = outcome.measurement.peak_bytes if outcome.measurement.status is Status.OK else None
        actual = rows[spec].measurement
        yield Judged(
            name=json.dumps(spec.to_json(), sort_keys=True),
            actual_mib=(actual.peak_bytes or 0) / MIB,
            oom=actual.status is Status.OOM,
            estimate_mib=None if estimate is None else estimate / MIB,
        )


def main(argv: Sequence[str]) -> None:
    """Carry out `vramcast evaluate`."""
    arguments = _parser().parse_args(argv)
    check_count("--bucket-mib", arguments.bucket_mib)
    check_count("--workers", arguments.workers)
    rows = list(read_rows(Path(arguments.data)))[: arguments.rows]
    if not rows:
        raise UserError(f"expected measured rows in {arguments.data}, found none: name another file")
    if arguments.checkpoint is not None:
        if arguments.worst:
            raise UserError("expected --worst for a backend alone, found it with --checkpoint: leave it out")
        _checkpoint(arguments, rows)
    else:
        _backend(arguments, rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vramcast evaluate", description=__doc__)
    judged = parser.add_mutually_exclusive_group()
    judged.add_argument("--backend", default="virtual", choices=["virtual", "static"])
    judged.add_argument("--checkpoint", metavar="NAME", help="a trained estimator, its directory or released name")
    parser.add_argument("--data", required=True, metavar="FILE", help="a public table of measurements")
    parser.add_argument("--device", help="a device profile; default: the one that the table was measured on")
    parser.add_argument("--bucket-mib", type=int, default=1024)
    parser.add_argument("--rows", type=int, help="only the first so many")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--worst", type=int, default=0, help="of a backend: show the rows that are furthest off")
    parser.add_argument(
        "--risk", type=float, default=0.05, help="of a checkpoint: how often the safe bucket may be low"
    )
    parser.add_argument("--cache", default="runs/simulations", metavar="DIR", help="where simulations are kept")
    parser.add_argument("--json", action="store_true")
    return parser


def _backend(arguments: argparse.Namespace, rows: Sequence[Row]) -> None:
    device = arguments.device or rows[0].provenance.device
    backend = make_backend({"backend": {"name": arguments.backend}, "device": load_device(str(device))})
    metrics, judged = evaluate_backend(backend, rows, arguments.bucket_mib, arguments.workers)
    figures = {**metrics.to_json(), "backend": arguments.backend, "profile": device, "bucket_mib": arguments.bucket_mib}
    print(json.dumps(figures) if arguments.json else _text(figures))
    for row in sorted(judged, key=lambda item: -abs(item.relative_error))[: arguments.worst]:
        print(f"{row.relative_error:+8.1%} measured {row.actual_mib:8.0f} estimated {row.estimate_mib} {row.name}")


def _checkpoint(arguments: argparse.Namespace, rows: Sequence[Row]) -> None:
    # imported here, since a backend is judged without scikit-learn
    from models.evaluation import evaluate_checkpoint  # noqa: PLC0415
    from models.simulation import SimulationCache  # noqa: PLC0415

    found = evaluate_checkpoint(
        arguments.checkpoint,
        rows,
        Path(arguments.data),
        bucket_mib=arguments.bucket_mib,
        risk=arguments.risk,
        device=arguments.device,
        cache=SimulationCache(arguments.cache, arguments.workers),
    )
    print(json.dumps(found.to_json(), allow_nan=False) if arguments.json else found.to_text())


def _text(figures: dict[str, object]) -> str:
    shown = {name: f"{value:.4f}" if isinstance(value, float) else value for name, value in figures.items()}
    return "\n".join(f"{name:24} {value}" for name, value in shown.items())
