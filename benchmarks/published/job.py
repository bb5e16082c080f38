"""A published run as a job: a script with its parameters, the stack that it needs, and the figure that was measured."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from vramcast.virtual_gpu.canonical import content_hash
from vramcast.virtual_gpu.replay.length_orders import LengthOrders

Record = Mapping[str, str]
METRICS = ("allocated", "active", "reserved", "smi")
RANK_SCRIPT = "rank"
"""The script of a job that is one rank of a run on several GPUs: its parameters describe a network and a training."""


@dataclass(frozen=True, kw_only=True)
class PublishedJob:
    """One run, or several equal runs whose figures were combined."""

    group: str
    """The kind of runs that are evaluated together."""
    title: str
    script: str
    parameters: Mapping[str, Any]
    """The argument of the script, as JSON."""
    stack: str | None
    """The environment that the script needs; None: the running interpreter."""
    device: str
    metric: str
    published_bytes: float
    nonzero_fraction: float = 1.0
    """The part of its places that a mask with unknown values selects, such as the tokens of an expert."""
    runs: int = 1
    assumptions: tuple[str, ...] = field(default=())
    guesses_lengths: bool = False
    """The lengths of samples were not published and may be longer than assumed, so the safe figure is wider."""
    orders: LengthOrders | None = None
    """Orders of batches of varying lengths: the reserved figure is the median over them."""
    launcher: tuple[str, ...] = ()
    """Options of the interpreter that start the script as a rank of several; rank 0 is simulated."""
    visible_mib: int | None = None
    """The memory of the GPU where it is not that of the device's profile."""

    @property
    def key(self) -> str:
        """Return a hash of everything that decides the simulation."""
        names = ("script", "parameters", "stack", "device", "nonzero_fraction")
        values = {name: getattr(self, name) for name in names}
        if self.orders:
            values["orders"] = asdict(self.orders)
        if self.launcher:
            values["launcher"] = self.launcher
        if self.visible_mib:
            values["visible_mib"] = self.visible_mib
        return content_hash(values)


def combined(jobs: Iterable[PublishedJob]) -> list[PublishedJob]:
    """Return each job once, with the median of the figures of its repeated runs."""
    equal: dict[tuple[str, str, str], list[PublishedJob]] = {}
    for job in jobs:
        equal.setdefault((job.key, job.metric, job.group), []).append(job)
    return [
        replace(same[0], published_bytes=statistics.median(job.published_bytes for job in same), runs=len(same))
        for same in equal.values()
    ]
