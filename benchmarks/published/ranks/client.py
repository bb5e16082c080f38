"""The parent's side of a rank: runs the child in the interpreter of a stack, and reads its result."""

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramcast.errors import UserError
from vramcast.simulation.result import Simulation
from vramcast.simulation.sandbox.isolation import clean_environment

if TYPE_CHECKING:
    from vramcast.virtual_gpu.profile import DeviceProfile

_CHILD = Path(__file__).with_name("child.py")


def rank_files() -> list[Path]:
    """Return the files that decide what a rank does, beside the virtual GPU: those of the networks and their steps."""
    here = Path(__file__).resolve()
    own = sorted(path for path in here.parent.glob("*.py") if path.name not in (here.name, "child.py"))
    return [
        *own,
        here.parents[3] / "jobs" / "checkpointing.py",
    ]


def run_rank(
    title: str, parameters: Mapping[str, Any], profile: "DeviceProfile", python: Path, timeout_seconds: float
) -> tuple[dict[str, int], Simulation]:
    """Simulate a rank in a process of its own: return its figures and its simulation."""
    with tempfile.TemporaryDirectory(prefix="vramcast-") as directory:
        path = Path(directory) / "result.json"
        request = {"parameters": parameters, "device": asdict(profile), "result": str(path)}
        try:
            ended = subprocess.run(
                [python, _CHILD, json.dumps(request)],
                env=clean_environment(os.environ), capture_output=True, text=True, timeout=timeout_seconds, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise UserError(
                f"expected {title} within {timeout_seconds:g} s, found no end: use an idle machine"
            ) from error
        if path.exists():
            values = json.loads(path.read_text(encoding="utf-8"))
        else:
            values = {"error": (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]}
    if "error" in values:
        raise UserError(f"expected figures of {title}, found none: {values['error']}")
    return values["figures"], Simulation.from_json(values["simulation"])
