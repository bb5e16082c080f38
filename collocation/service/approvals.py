"""The GPUs that pods were approved for, until their memory is seen in use."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from vramcast.collocation.placement import GpuState, Placement

_MOST_PODS = 10_000


@dataclass(frozen=True)
class _Approval:
    need_mib: float
    free_mib: float
    """Free memory of the GPU as its node stated it then."""
    until: float


class Approvals:
    """Approvals of pods for GPUs. Their needs are subtracted from the free memory that was stated before them.

    kube-scheduler does not say where it binds a pod: the approved node is that with the highest score, or the only one.
    Once a pod uses its memory, its node states less free memory, and nothing more is subtracted. An approval ends after
    `seconds`, or with the pod's next one.
    """

    def __init__(self, seconds: float = 120.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._gpus_of_pod: OrderedDict[str, list[tuple[str, str]]] = OrderedDict()
        self._by_gpu: dict[tuple[str, str], dict[str, _Approval]] = {}

    def __len__(self) -> int:
        return len(self._gpus_of_pod)

    def approve(self, pod: str, node: str, placements: Sequence[Placement], stated: Sequence[GpuState]) -> None:
        """Approve a pod for GPUs of a node, in place of its earlier approval."""
        self._end(pod)
        until, free = self._clock() + self._seconds, {gpu.id: gpu.free_mib for gpu in stated}
        self._gpus_of_pod[pod] = [(node, item.gpu.id) for item in placements]
        for item in placements:
            approval = _Approval(item.need_mib, free[item.gpu.id], until)
            self._by_gpu.setdefault((node, item.gpu.id), {})[pod] = approval
        if len(self._gpus_of_pod) > _MOST_PODS:
            self._end(next(iter(self._gpus_of_pod)))

    def subtracted(self, pod: str, node: str, gpus: Sequence[GpuState]) -> list[GpuState]:
        """Return the GPUs of a node without the memory that other pods were approved for."""
        return [replace(gpu, free_mib=self._free_mib(pod, node, gpu)) for gpu in gpus]

    def _free_mib(self, pod: str, node: str, gpu: GpuState) -> float:
        now = self._clock()
        for name, item in list(self._by_gpu.get((node, gpu.id), {}).items()):
            if item.until <= now:
                self._end(name)
        others = [item for name, item in self._by_gpu.get((node, gpu.id), {}).items() if name != pod]
        if not others:
            return gpu.free_mib
        expected_mib = others[0].free_mib - sum(item.need_mib for item in others)
        return max(0.0, min(gpu.free_mib, expected_mib))

    def _end(self, pod: str) -> None:
        for key in self._gpus_of_pod.pop(pod, []):
            approvals = self._by_gpu[key]
            approvals.pop(pod, None)
            if not approvals:
                del self._by_gpu[key]
