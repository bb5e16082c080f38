"""The choice of a GPU for a job: pure functions over free memory, in MiB, as schedulers count."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from vramcast.errors import UserError, check_choice


@dataclass(frozen=True, slots=True)
class GpuState:
    """One GPU as a scheduler sees it."""

    id: str
    free_mib: float
    total_mib: float | None
    """None if unknown: a job may then be too large for the free memory, never for the GPU."""
    device: str | None = None
    """Its device profile; None for the default."""
    node: str | None = None
    jobs: int = 0
    """The number of jobs that it runs; an exclusive job needs 0."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A GPU that a job fits on."""

    gpu: GpuState
    need_mib: float
    left_mib: float
    """The free memory that remains."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A GPU that a job does not fit on."""

    gpu: GpuState
    reason: str
    for_good: bool
    """True if the GPU itself is too small, so that neither waiting nor preempting helps."""


Need = float | Mapping[str | None, float]
"""MiB to reserve, with margins; or by device profile, because the memory of a context depends on the device."""

_ORDERS: Mapping[str, Callable[[Placement], float] | None] = {
    "first-fit": None,
    "best-fit": lambda placement: placement.left_mib,
    "most-free": lambda placement: -placement.left_mib,
    "exclusive": None,
}
POLICIES = tuple(_ORDERS)
"""The first GPU; the one with the least left; the one with the most left; the first without jobs."""


def place(need: Need, gpus: Iterable[GpuState], policy: str = "best-fit") -> Placement | None:
    """Return the GPU that a policy chooses, or None if the job fits on none. Of equals, return the first."""
    order = _order(policy)
    fitting = _fitting(need, gpus, policy)
    return next(fitting, None) if order is None else min(fitting, key=order, default=None)


def rank(need: Need, gpus: Iterable[GpuState], policy: str = "best-fit") -> list[Placement]:
    """Return all GPUs that the job fits on, the choice of the policy first."""
    order = _order(policy)
    fitting = list(_fitting(need, gpus, policy))
    return fitting if order is None else sorted(fitting, key=order)


def refusals(need: Need, gpus: Iterable[GpuState], policy: str = "best-fit") -> list[Refusal]:
    """Return the other GPUs, each with the reason."""
    check_choice("the policy", policy, POLICIES)
    return [refusal for gpu in gpus if (refusal := _refusal(_need(need, gpu), gpu, policy)) is not None]


def _order(policy: str) -> Callable[[Placement], float] | None:
    check_choice("the policy", policy, POLICIES)
    return _ORDERS[policy]


def _fitting(need: Need, gpus: Iterable[GpuState], policy: str) -> Iterator[Placement]:
    for gpu in gpus:
        need_mib = _need(need, gpu)
        if _refusal(need_mib, gpu, policy) is None:
            yield Placement(gpu, need_mib, gpu.free_mib - need_mib)


def _need(need: Need, gpu: GpuState) -> float:
    if not isinstance(need, Mapping):
        return need
    if gpu.device not in need:
        raise UserError(
            f"expected the need of the job on the device {gpu.device}, found it for {sorted(map(str, need))}: add it"
        )
    return need[gpu.device]


def _refusal(need_mib: float, gpu: GpuState, policy: str) -> Refusal | None:
    if gpu.total_mib is not None and need_mib > gpu.total_mib:
        return Refusal(gpu, f"needs {need_mib:.0f} MiB, the GPU has {gpu.total_mib:.0f}", for_good=True)
    if policy == "exclusive" and gpu.jobs:
        return Refusal(gpu, f"runs {gpu.jobs} jobs, and the job needs a GPU of its own", for_good=False)
    if need_mib > gpu.free_mib:
        return Refusal(gpu, f"needs {need_mib:.0f} MiB, {gpu.free_mib:.0f} are free", for_good=False)
    return None
