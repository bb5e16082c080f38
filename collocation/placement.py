"""Which GPU a job goes to: pure functions over what is free now. MiB, as schedulers count."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from vramcast.errors import UserError, check_choice


@dataclass(frozen=True, slots=True)
class GpuState:
    """One GPU as a scheduler sees it."""

    id: str
    free_mib: float
    total_mib: float | None
    """None where nobody said it: a job may then be too large for what is free, never for the card."""
    device: str | None = None
    """The device profile that stands for it, None for the asker's default."""
    node: str | None = None
    jobs: int = 0
    """How many it runs now; an exclusive job wants none."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A GPU that a job fits on."""

    gpu: GpuState
    need_mib: float
    left_mib: float
    """What stays free there."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A GPU that a job does not fit on."""

    gpu: GpuState
    reason: str
    for_good: bool
    """True where the card itself is too small, so that waiting or preempting helps nothing."""


Need = float | Mapping[str | None, float]
"""MiB to set aside, margins included; or by device profile, where cards differ in what they hold beside a job."""

_ORDERS: Mapping[str, Callable[[Placement], float] | None] = {
    "first-fit": None,
    "best-fit": lambda found: found.left_mib,
    "most-free": lambda found: -found.left_mib,
    "exclusive": None,
}
POLICIES = tuple(_ORDERS)
"""The first in order; the one with least left; the one with most left; the first that runs nothing."""


def place(need: Need, gpus: Iterable[GpuState], policy: str = "best-fit") -> Placement | None:
    """The GPU that a policy chooses, None where the job fits on none. Of equals the first in order."""
    order = _order(policy)
    fitting = _fitting(need, gpus, policy)
    return next(fitting, None) if order is None else min(fitting, key=order, default=None)


def rank(need: Need, gpus: Iterable[GpuState], policy: str = "best-fit") -> list[Placement]:
    """All GPUs that the job fits on, the policy's choice first."""
    order = _order(policy)
    fitting = list(_fitting(need, gpus, policy))
    return fitting if order is None else sorted(fitting, key=order)


def refusals(need: Need, gpus: Iterable[GpuState], policy: str = "best-fit") -> list[Refusal]:
    """The others, each with the reason."""
    check_choice("the policy", policy, POLICIES)
    return [found for gpu in gpus if (found := _refusal(_need(need, gpu), gpu, policy)) is not None]


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
            f"expected what the job needs on the device {gpu.device}, found it for {sorted(map(str, need))}: add it"
        )
    return need[gpu.device]


def _refusal(need_mib: float, gpu: GpuState, policy: str) -> Refusal | None:
    if gpu.total_mib is not None and need_mib > gpu.total_mib:
        return Refusal(gpu, f"needs {need_mib:.0f} MiB, the card has {gpu.total_mib:.0f}", for_good=True)
    if policy == "exclusive" and gpu.jobs:
        return Refusal(gpu, f"runs {gpu.jobs} already, and the job is to be alone", for_good=False)
    if need_mib > gpu.free_mib:
        return Refusal(gpu, f"needs {need_mib:.0f} MiB, {gpu.free_mib:.0f} are free", for_good=False)
    return None
