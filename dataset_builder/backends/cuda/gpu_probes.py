"""Measures probes on a GPU, in one child process for each round of a search."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vramcast.child.messages import REFUSED
from vramcast.child.process import module_command
from vramcast.dataset_builder.backends.cuda.backend import child_environment
from vramcast.dataset_builder.backends.cuda.gpu_choice import AUTO, candidates, claimed, visible_gpus
from vramcast.dataset_builder.backends.cuda.supervisor import supervise
from vramcast.device.calibration.probes import Probe
from vramcast.device.nvml import open_nvml
from vramcast.errors import UserError

CHILD = tuple(module_command("vramcast.dataset_builder.backends.cuda.probe_child"))
_TIMEOUT_SECONDS = 600.0


class GpuProbes:
    """Probes of this machine's GPU. Their workspaces are kept in a file, so that an interrupted search resumes."""

    def __init__(self, path: Path, command: Sequence[str] = CHILD) -> None:
        self.path = path
        self.command = command
        self.libraries: dict[str, Any] = {}
        """The workspaces of cuBLAS and cublasLt."""
        self._known: dict[Probe, int | None] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            self._read(json.loads(line))

    def _read(self, record: Mapping[str, Any]) -> None:
        self._known |= {Probe(**item["probe"]): item["bytes"] for item in record["probes"]}
        self.libraries |= record["libraries"]

    def __call__(self, probes: Sequence[Probe]) -> dict[Probe, int]:
        """Return the workspace of each probe, without those that the GPU is too small for."""
        if new := [probe for probe in probes if probe not in self._known]:
            result = dict(self._measure(new))
            sizes = result["workspaces"]
            pairs = [{"probe": asdict(probe), "bytes": size} for probe, size in zip(new, sizes, strict=True)]
            libraries = {name: value for name, value in result.items() if name.endswith("workspace_bytes")}
            self._write({"libraries": libraries, "probes": pairs})
        return {probe: size for probe in probes if (size := self._known[probe]) is not None}

    def _write(self, record: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self._read(record)

    def _measure(self, probes: Sequence[Probe]) -> Mapping[str, Any]:
        request = {"probes": [asdict(probe) for probe in probes]}
        with open_nvml() as nvml:
            gpus = candidates(visible_gpus(nvml, os.environ), AUTO)
            with claimed(nvml, gpus, record=False, wait_seconds=_TIMEOUT_SECONDS) as (gpu, _):
                environment = child_environment(os.environ, gpu, "")
                end = supervise(
                    self.command, environment, request, _TIMEOUT_SECONDS, lambda pid, event: None, lambda: None
                )
        if end.result is None or end.result["event"] == REFUSED:
            reason = end.result.get("reason") if end.result else end.evidence
            raise UserError(
                f"expected a child process to measure {len(probes)} probes, found: {reason}: "
                "fix torch or the driver, or use --from-rows, which needs no GPU"
            )
        return end.result
