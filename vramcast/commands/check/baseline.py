"""The baseline file of `vramcast check`: the memory that each checked job took when it was written."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramcast.errors import UserError
from vramcast.files.durable import replacing

_FORMAT = 1
_FIGURES = ("safe_mib", "estimate_mib", "allocated_mib", "reserved_mib")
_KEPT = ("device", "verdict", "traced_with")


@dataclass(frozen=True)
class Baseline:
    """Figures of jobs, by the words of the commands that check them."""

    path: Path
    jobs: Mapping[str, Mapping[str, Any]]

    @classmethod
    def read(cls, path: Path, *, may_be_absent: bool = False) -> "Baseline":
        """Read a baseline file; where it may be absent, an empty one stands for it."""
        if may_be_absent and not path.exists():
            return cls(path, {})
        try:
            return cls(path, parse_baseline(path.read_bytes()))
        except FileNotFoundError as error:
            raise UserError(f"expected a baseline at {path}, found none: make it with --write-baseline") from error
        except (OSError, ValueError) as error:
            raise UserError(
                f"expected a baseline of vramcast check in {path}, found: {error}; write it anew with --write-baseline"
            ) from error

    def safe_mib(self, job: str) -> float:
        """Return the safe figure of a job."""
        if job not in self.jobs:
            raise UserError(
                f"expected {job!r} in the baseline {self.path}, found {sorted(self.jobs)}: add it with --write-baseline"
            )
        return float(self.jobs[job]["safe_mib"])

    def write(self, job: str, answer: Mapping[str, Any]) -> None:
        """Write the file with the figures of one job replaced."""
        entry = {name: answer.get(name) for name in (*_FIGURES, *_KEPT)}
        values = {"format": _FORMAT, "jobs": dict(sorted({**self.jobs, job: entry}.items()))}
        with replacing(self.path) as temporary:
            temporary.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def parse_baseline(data: bytes) -> Mapping[str, Mapping[str, Any]]:
    """Return the jobs of a baseline file; raise ValueError for anything else."""
    try:
        values = json.loads(data)
    except RecursionError as error:
        raise ValueError("values that are nested too deeply") from error
    if not isinstance(values, dict) or values.get("format") != _FORMAT or not isinstance(values.get("jobs"), dict):
        raise ValueError(f"no object of format {_FORMAT} with jobs")
    for name, entry in values["jobs"].items():
        figure = entry.get("safe_mib") if isinstance(entry, dict) else None
        if not isinstance(figure, int | float) or isinstance(figure, bool) or not 0 < figure < float("inf"):
            raise ValueError(f"the job {name!r} without a safe_mib above 0")
    return dict(values["jobs"])
