"""The process that simulates one rank, in the interpreter of its stack: `child.py REQUEST`, paths in JSON."""

import json
import sys
from pathlib import Path
from typing import Any


def main(text: str) -> None:
    """Simulate the rank of a request and write its result."""
    sys.path[0] = str(Path(__file__).resolve().parents[3])  # the stack has neither vramcast nor this package
    from vramcast.jobs.families.libraries import tolerate_broken_torchvision  # noqa: PLC0415
    from vramcast.virtual_gpu.profile import parse_profile  # noqa: PLC0415

    tolerate_broken_torchvision()
    from benchmarks.published.ranks.simulation import simulate_rank  # noqa: PLC0415 - imports torch

    request = json.loads(text)
    values: dict[str, Any]
    try:
        result = simulate_rank(request["parameters"], parse_profile(request["device"]))
        values = {"figures": result.figures, "simulation": result.simulation.to_json()}
    except Exception as error:  # libraries may raise anything; the parent reports it
        values = {"error": f"{type(error).__name__}: {error}"}
    Path(request["result"]).write_text(json.dumps(values), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
