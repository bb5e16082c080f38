"""`vramcast device verify`: measure the golden specs on a GPU and compare them with the virtual GPU."""

import argparse
import json
import sys
from pathlib import Path

from vramcast.dataset_builder.configuration import make_cuda, make_virtual
from vramcast.dataset_builder.rows import Row
from vramcast.dataset_builder.verification import compare, measure_golden, read_recorded, write_recorded
from vramcast.device.profiles import device_or_default, load_device
from vramcast.errors import UserError


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison and return 0 if both agree, 1 if not."""
    if arguments.recorded and (arguments.record or arguments.cap or arguments.gpu != "auto"):
        raise UserError("expected --recorded alone, found options for a GPU as well: drop them, or --recorded")
    measured = read_recorded(Path(arguments.recorded)) if arguments.recorded else _measure_on_gpu(arguments)
    device = arguments.device or device_or_default(measured[0].provenance.device, _note)
    simulated = measure_golden(make_virtual(load_device(device)), lambda _: None)
    verification = compare(simulated, measured, device)
    print(json.dumps(verification.to_json()) if arguments.json else verification.to_text())
    return 0 if verification.passed else 1


def _measure_on_gpu(arguments: argparse.Namespace) -> list[Row]:
    """Measure the golden specs on one GPU; --record writes the rows even if the run is interrupted."""
    settings = {"gpu": arguments.gpu, "on_busy": arguments.on_busy}
    lane = make_cuda(settings).lanes()[0]
    estimator = None
    if arguments.cap:
        estimator = make_virtual(load_device(arguments.device or device_or_default(lane.device, lambda _: None)))
    rows: list[Row] = []

    def report(row: Row) -> None:
        rows.append(row)
        _note(f"{len(rows)}: {row.measurement.status} after {row.measurement.seconds or 0:.1f} s")

    try:
        measure_golden(make_cuda({**settings, "gpu": lane.settings.gpu}, estimator), report)
    finally:
        if arguments.record and rows:
            write_recorded(Path(arguments.record), rows)
    return rows


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)
