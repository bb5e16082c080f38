"""The need of each job under an estimator."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vramcast.collocation.cluster_simulation.workload import ESTIMATE_COLUMNS, TraceJob
from vramcast.errors import UserError, check_count
from vramcast.virtual_gpu.allocator.sizes import MIB

ORACLE, OURS, NONE = "oracle", "ours", "none"
ESTIMATORS = (ORACLE, OURS, *ESTIMATE_COLUMNS, NONE)
FLOOR_MIB = 5120
"""Without an estimator, a GPU is shared while this much is free: the rule of CARMA and AEGIS."""


@dataclass(frozen=True)
class NeedRules:
    """The rules that turn estimates into needs."""

    capacity_bytes: int
    """The need of a job without an estimate: a GPU of its own."""
    margin_mib: int = 0
    """Added to point estimates, also the oracle's; CARMA and AEGIS add 2048. A bound includes its margin."""
    floor_mib: int = FLOOR_MIB

    def __post_init__(self) -> None:
        check_count("--margin-mib", self.margin_mib, least=0)
        check_count("--floor-mib", self.floor_mib)

    def needs_bytes(
        self, estimator: str, jobs: Iterable[TraceJob], bounds_bytes: Mapping[str, int] | None = None
    ) -> dict[str, int]:
        """Return the needs by name of job; `bounds_bytes` are ours."""
        return {job.name: self._need(estimator, job, bounds_bytes or {}) for job in jobs}

    def _need(self, estimator: str, job: TraceJob, bounds_bytes: Mapping[str, int]) -> int:
        if estimator == NONE:
            return self.floor_mib * MIB
        if estimator == OURS:
            return bounds_bytes.get(job.name, self.capacity_bytes)
        margin_bytes = self.margin_mib * MIB
        if estimator == ORACLE:
            return job.peak_bytes + margin_bytes
        return job.estimates_bytes.get(estimator, self.capacity_bytes) + margin_bytes


def estimators_of(text: str) -> tuple[str, ...]:
    """Parse names with commas between them, or 'all'."""
    names = ESTIMATORS if text == "all" else tuple(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in ESTIMATORS]
    if unknown:
        raise UserError(f"expected --estimator among {list(ESTIMATORS)} or 'all', found {unknown}: change it")
    return names
