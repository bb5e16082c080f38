"""GPUs as text: as arguments of a command, JSON, or the output of nvidia-smi."""

import csv
import json
import math
import re
from io import StringIO
from typing import Any

from vramcast.collocation.placement import GpuState
from vramcast.device.profiles import device_of_gpu
from vramcast.errors import UserError

_GPU = re.compile(r"(?P<id>[^=]+)=(?P<free>\d+(?:\.\d+)?)(?:/(?P<total>\d+(?:\.\d+)?))?(?:@(?P<device>\w+))?")


def parse_gpu(text: str) -> GpuState:
    """Parse '0=12000/40960@a100_40gb'; the total and the device are optional."""
    match = _GPU.fullmatch(text.strip())
    if not match:
        raise UserError(
            f"expected a GPU such as 0=12000 or 0=12000/40960@a100_40gb, found {text!r}: write it like that"
        )
    return GpuState(match["id"], float(match["free"]), _amount(match["total"]), match["device"])


def parse_gpus(text: str) -> list[GpuState]:
    """Parse a JSON list, or nvidia-smi's CSV: index, free, total, and optionally the name of the GPU."""
    try:
        gpus = _from_json(json.loads(text)) if text.lstrip().startswith("[") else _from_csv(text)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, csv.Error) as error:
        raise UserError(
            f"expected GPUs as a JSON list or as nvidia-smi's CSV without units, found other text ({error!r}): fix it"
        ) from error
    if not all(math.isfinite(gpu.free_mib) and math.isfinite(gpu.total_mib or 0) for gpu in gpus):
        raise UserError("expected finite amounts of memory, found others: fix them")
    return gpus


def _from_json(items: Any) -> list[GpuState]:
    return [
        GpuState(
            str(item["id"]),
            float(item["free_mib"]),
            _amount(item.get("total_mib")),
            item.get("device"),
            item.get("node"),
            int(item.get("jobs", 0)),
        )
        for item in items
    ]


def _amount(value: Any) -> float | None:
    return None if value is None else float(value)


def _from_csv(text: str) -> list[GpuState]:
    lines = [line for line in csv.reader(StringIO(text, newline=""), skipinitialspace=True) if line]
    return [
        GpuState(line[0], float(line[1]), float(line[2]), device_of_gpu(line[3]) if len(line) > 3 else None)
        for line in lines
    ]
