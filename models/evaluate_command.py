"""`vramcast evaluate`: the estimates of a backend or a checkpoint against a table of measurements."""

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from vramcast.dataset_builder.configuration import make_backend
from vramcast.dataset_builder.defaults import BUCKET_MIB, RISK, SIMULATIONS
from vramcast.dataset_builder.devices import load_device, load_profile
from vramcast.dataset_builder.executors import LocalExecutor
from vramcast.dataset_builder.exit_codes import exit_code
from vramcast.dataset_builder.measure.virtual import VirtualBackend
from vramcast.dataset_builder.progress import bar
from vramcast.dataset_builder.schema import Row
from vramcast.dataset_builder.store.importers import read_rows
from vramcast.dataset_builder.store.splits import HALVES, in_half
from vramcast.errors import UserError, check_count
from vramcast.models.metrics import Judged, judge
from vramcast.models.simulation import SimulationCache
from vramcast.virtual_gpu.measurement import Measurement, Status
from vramcast.virtual_gpu.sizes import MIB

_JUDGED = (Status.OK, Status.OOM)


def judged_rows(rows: Iterable[Row], estimates: Mapping[str, Measurement]) -> Iterator[Judged]:
    """Rows beside what was estimated of them; not those that died of anything but memory, or are censored."""
    for row in rows:
        found = estimates.get(row.spec.id)
        if row.measurement.status not in _JUDGED or found is None or found.status not in _JUDGED:
            continue
        estimate = found.peak_bytes if found.status is Status.OK else None
        yield Judged(
            name=json.dumps(row.spec.to_json(), sort_keys=True),
            actual_mib=(row.measurement.peak_bytes or 0) / MIB,
            oom=row.measurement.status is Status.OOM,
            estimate_mib=None if estimate is None else estimate / MIB,
            stack=f"{row.provenance.device} {row.provenance.time}",
        )


def _estimates(arguments: argparse.Namespace, device: str, rows: Iterable[Row]) -> Mapping[str, Measurement]:
    """What the backend says of the rows' specs. Simulations are kept: who is interrupted goes on where he was."""
    specs = list({row.spec.id: row.spec for row in rows if row.measurement.status in _JUDGED}.values())
    if arguments.backend == VirtualBackend.name:
        return SimulationCache(arguments.cache, arguments.workers).measure(specs, load_profile(device))
    backend = make_backend({"backend": {"name": arguments.backend}, "device": load_device(device)})
    outcomes = LocalExecutor(arguments.workers, timeout_seconds=600).run(backend, specs)
    return {spec.id: outcome.measurement for spec, outcome in bar(outcomes, total=len(specs), unit="row")}


def main(argv: Sequence[str]) -> int:
    """Run `vramcast evaluate` and return the exit code."""
    return exit_code("vramcast evaluate", lambda: _evaluate(argv))


def _evaluate(argv: Sequence[str]) -> None:
    arguments = _parser().parse_args(argv)
    check_count("--bucket-mib", arguments.bucket_mib)
    check_count("--workers", arguments.workers)
    check_count("--worst", arguments.worst, least=0)
    if arguments.rows is not None:
        check_count("--rows", arguments.rows)
    rows = [row for row in read_rows(Path(arguments.data)) if in_half(row.spec, arguments.half)][: arguments.rows]
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
    parser.add_argument("--device", help="a device profile for all rows; default: the one that each was measured on")
    parser.add_argument("--bucket-mib", type=int, default=BUCKET_MIB)
    parser.add_argument("--rows", type=int, help="only the first so many")
    parser.add_argument("--half", choices=list(HALVES), help="of the networks: profiles are calibrated on even ones")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--worst", type=int, default=0, help="of a backend: show the rows that are furthest off")
    parser.add_argument(
        "--risk",
        type=float,
        help=f"of a checkpoint: how often the safe bucket may be low; default {RISK} or its least",
    )
    parser.add_argument("--cache", default=SIMULATIONS, metavar="DIR", help="where simulations are kept")
    parser.add_argument("--json", action="store_true")
    return parser


def _backend(arguments: argparse.Namespace, rows: Sequence[Row]) -> None:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[arguments.device or str(row.provenance.device)].append(row)
    judged: list[Judged] = []
    for device, group in groups.items():
        judged += judged_rows(group, _estimates(arguments, device, group))
    figures = _figures(judged, len(rows), arguments.bucket_mib)
    settings = {"backend": arguments.backend, "profile": ", ".join(groups), "bucket_mib": arguments.bucket_mib}
    worst = sorted(judged, key=lambda item: -abs(item.relative_error))[: arguments.worst]
    if arguments.json:
        print(json.dumps({**figures, **settings, **({"worst": [asdict(item) for item in worst]} if worst else {})}))
        return
    print(_text({**figures, **settings}))
    for item in worst:
        print(
            f"{item.relative_error:+8.1%} measured {item.actual_mib:8.0f} estimated {item.estimate_mib} "
            f"{item.stack} {item.name}"
        )


def _figures(judged: Sequence[Judged], rows: int, bucket_mib: int) -> dict[str, object]:
    """The figures over all rows, and by stack where there are several."""
    figures: dict[str, object] = judge(judged, bucket_mib, excluded=rows - len(judged)).to_json()
    stacks = sorted({item.stack for item in judged})
    if len(stacks) > 1:
        parts = {name: [item for item in judged if item.stack == name] for name in stacks}
        figures["by_stack"] = {name: judge(part, bucket_mib).to_json() for name, part in parts.items()}
    return figures


def _checkpoint(arguments: argparse.Namespace, rows: Sequence[Row]) -> None:
    # imported here, since a backend is judged without scikit-learn
    from vramcast.models.evaluation import evaluate_checkpoint  # noqa: PLC0415

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
