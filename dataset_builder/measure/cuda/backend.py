"""A real GPU as a backend. What it says was read off a card: by torch in the child, by NVML from outside."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from vramcast import start
from vramcast.dataset_builder.measure._base import Backend, BackendResult
from vramcast.dataset_builder.measure.cuda.choice import AUTO, Others, candidates, claimed, free_gpus, visible_gpus
from vramcast.dataset_builder.measure.cuda.protocol import REFUSED, Request, Result, is_out_of_memory
from vramcast.dataset_builder.measure.cuda.sampling import Sampler, Share
from vramcast.dataset_builder.measure.cuda.supervision import Ending, supervise
from vramcast.dataset_builder.measure.nvml import Gpu, Nvml, open_nvml
from vramcast.dataset_builder.schema import Spec
from vramcast.errors import UserError, check_choice, check_count
from vramcast.virtual_gpu.allocator_options import AllocatorOptions
from vramcast.virtual_gpu.measurement import EVIDENCE_LENGTH, Measurement, Status

SLOWEST_INTERVAL_MS = 20
GONE_SECONDS = 5.0
"""What the driver is given to take back the memory of a process that has ended."""
CHILD = (sys.executable, "-P", start.__file__, "vramcast.dataset_builder.measure.cuda.child")
_CHANGES_FIGURES = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""Left out of the child's environment: a row would not show that they were set."""


@dataclass(frozen=True, kw_only=True)
class CudaSettings:
    """How to measure: `conf/backend/cuda.yaml`."""

    gpu: str = AUTO
    """A UUID or its beginning, an index of nvidia-smi, or 'auto' for any that is visible and free."""
    interval_ms: int = 10
    timeout_seconds: float = 240
    """Of one child."""
    on_busy: str = "refuse"
    epochs: int = 2
    allocator: str = ""
    """As PYTORCH_CUDA_ALLOC_CONF."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "gpu", str(self.gpu))
        check_count("backend.interval_ms", self.interval_ms)
        if self.interval_ms > SLOWEST_INTERVAL_MS:
            raise UserError(
                f"expected backend.interval_ms up to {SLOWEST_INTERVAL_MS}, found {self.interval_ms}: shorter peaks "
                "would be missed, change it"
            )
        seconds = self.timeout_seconds
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise UserError(f"expected backend.timeout_seconds to be over 0 s, found {seconds!r}: change it")
        check_choice("backend.on_busy", self.on_busy, ("refuse", "record"))
        check_count("backend.epochs", self.epochs)
        if not isinstance(self.allocator, str):
            raise UserError(f"expected backend.allocator to be text, found {self.allocator!r}: change it")
        AllocatorOptions.parse(self.allocator)  # torch would refuse it in every child


@dataclass(frozen=True)
class Run:
    """One child's run, with what was seen of it."""

    measurement: Measurement
    versions: Mapping[str, str] = field(default_factory=dict)


class CudaBackend(Backend):
    """Measures on a card, each spec in a fresh child process, while a thread here samples NVML."""

    name = "cuda"
    origin = "measured"

    def __init__(
        self, settings: CudaSettings, estimator: Backend | None = None, command: Sequence[str] = CHILD
    ) -> None:
        self.settings = settings
        self.estimator = estimator
        """Whose estimate is tried as a limit of the allocator in a second run, None for no second run."""
        self.command = tuple(command)
        runs = 1 if estimator is None else 2
        self.longest_seconds = settings.timeout_seconds * (runs + 1)  # it may wait for the GPU as long as for a run

    def lanes(self) -> list[Self]:
        """This backend on each GPU that it may use: those that are visible, asked for, and free."""
        with open_nvml() as nvml:
            gpus = candidates(visible_gpus(nvml, os.environ), self.settings.gpu)
            free = free_gpus(nvml, gpus, self._record)
        found = []
        for gpu, _ in free:
            found.append(type(self)(replace(self.settings, gpu=gpu.uuid), self.estimator, self.command))
            found[-1].device = gpu.name
        return found

    @property
    def _record(self) -> bool:
        return self.settings.on_busy == "record"

    def measure(self, spec: Spec) -> BackendResult:
        """Train a spec in a child, and once more under the estimate if that is to be tried."""
        start = time.perf_counter()
        with open_nvml() as nvml:
            gpus = candidates(visible_gpus(nvml, os.environ), self.settings.gpu)
            with claimed(nvml, gpus, self._record, self.settings.timeout_seconds) as (gpu, others):
                run = self._run(nvml, gpu, others, Request(spec=spec, epochs=self.settings.epochs))
                measurement = replace(run.measurement, seconds=round(time.perf_counter() - start, 4))
                if measurement.status is Status.OK:
                    measurement = self._under_estimate(nvml, gpu, others, spec, measurement)
            versions = {**nvml.versions(), **run.versions}
        return BackendResult(measurement, gpu.name, gpu.uuid, versions)

    def _under_estimate(
        self, nvml: Nvml, gpu: Gpu, others: Others, spec: Spec, measurement: Measurement
    ) -> Measurement:
        """Whether the estimate is safe as a cap, as xMem tries it: the same run must live within it."""
        estimate_bytes = _estimate(self.estimator, spec)
        if estimate_bytes is None:
            return measurement
        request = Request(spec=spec, epochs=self.settings.epochs, cap_bytes=estimate_bytes)
        status = self._run(nvml, gpu, others, request).measurement.status
        # at the cap the allocator may have emptied its cache, which costs time and no more: it held
        held = {Status.OK: True, Status.CENSORED: True, Status.OOM: False}.get(status)
        return replace(measurement, cap_bytes=request.cap_bytes, cap_held=held)

    def _run(self, nvml: Nvml, gpu: Gpu, others: Others, request: Request) -> Run:
        context: list[Share] = []

        def look(pid: int, event: Mapping[str, Any]) -> None:
            _check_identity(gpu, event.get("uuid"))
            sampler.identify(pid)
            context.append(sampler.share())

        def watch() -> None:
            if sampler.failure is not None:
                raise sampler.failure

        with Sampler(nvml, gpu, others, self.settings.interval_ms / 1000) as sampler:
            environment = child_environment(os.environ, gpu, self.settings.allocator)
            ending = supervise(self.command, environment, request.to_json(), self.settings.timeout_seconds, look, watch)
            watch()
            sampler.wait_until_gone(GONE_SECONDS)
        result = _verdict(ending, self.settings.timeout_seconds)
        if not context and result.status is Status.CRASHED:  # no spec had a part in it: all others would end so too
            raise UserError(
                f"expected a child process to reach its CUDA context, found that {result.evidence}: "
                "mend torch or the driver, or use backend=virtual, which needs no GPU"
            )
        return Run(_measurement(result, sampler, context[0] if context else None), result.versions)


def _estimate(estimator: Backend | None, spec: Spec) -> int | None:
    """What an estimator says that the allocator will reserve; None if there is no estimator, or no answer."""
    try:
        found = estimator.measure(spec).measurement if estimator else None
    except Exception:  # the estimator's failure is no reason to lose what was measured
        return None
    return found.reserved_bytes if found and found.status is Status.OK else None


def child_environment(environment: Mapping[str, str], gpu: Gpu, allocator: str) -> dict[str, str]:
    """The environment of a child: one GPU, and nothing that changes figures unseen."""
    kept = {name: value for name, value in environment.items() if name not in _CHANGES_FIGURES}
    options = {"PYTORCH_CUDA_ALLOC_CONF": allocator} if allocator else {}
    return {**kept, **options, "CUDA_VISIBLE_DEVICES": gpu.uuid}


def _check_identity(gpu: Gpu, found: str | None) -> None:
    """Refuse figures of two cards; CUDA names the instances of a card in MIG mode in more ways than one."""
    if found is not None and not gpu.is_instance and gpu.uuid != f"GPU-{found}":
        raise UserError(
            f"expected CUDA to show {gpu.uuid}, found GPU-{found}: see that no library sets CUDA_VISIBLE_DEVICES"
        )


def _verdict(ending: Ending, timeout_seconds: float) -> Result:
    """How a child's run went, from what it reported or, if it could not, from how it ended."""
    if ending.result is not None and ending.result["event"] == REFUSED:
        raise UserError(str(ending.result.get("reason")))
    if ending.timed_out:
        evidence = f"no result after {timeout_seconds:g} s" + (f": {ending.said}" if ending.said else "")
        return Result(status=Status.TIMEOUT, evidence=evidence[:EVIDENCE_LENGTH])
    evidence = ending.evidence
    if ending.result is not None:
        try:
            return _at_the_limit(Result.from_json(ending.result))
        except ValueError as error:
            evidence = f"the child's answer is no result ({error})"[:EVIDENCE_LENGTH]
    full = is_out_of_memory(ending.said)  # a library may end the process instead of raising
    return Result(status=Status.OOM if full else Status.CRASHED, evidence=evidence)


def _at_the_limit(result: Result) -> Result:
    """A run that had to empty the allocator's cache shows what the card had, not what it needed."""
    if result.status is not Status.OK or not result.retries:
        return result
    evidence = f"the card was full: the allocator emptied its cache {result.retries} times"
    return replace(result, status=Status.CENSORED, evidence=evidence)


def _measurement(result: Result, sampler: Sampler, context: Share | None) -> Measurement:
    share = sampler.share()
    return Measurement(
        status=result.status,
        requested_bytes=result.requested_bytes,
        allocated_bytes=result.allocated_bytes,
        reserved_bytes=result.reserved_bytes,
        device_used_bytes=share.most_bytes,
        breakdown=_breakdown(share.most_bytes, result.reserved_bytes, context.most_bytes if context else None),
        evidence=result.evidence,
        process_bytes=share.process_bytes,
        alone=sampler.alone,
        others_bytes=sampler.others_bytes,
        samples=sampler.samples,
        longest_gap_ms=round(1000 * sampler.longest_gap_seconds, 1),
    )


def _breakdown(device_bytes: int | None, reserved_bytes: int | None, context_bytes: int | None) -> dict[str, int]:
    """The device's peak as the bare context, what the allocator reserved, and what libraries loaded since."""
    if context_bytes is None:
        return {}
    if device_bytes is None or reserved_bytes is None:
        return {"context": context_bytes}
    libraries_bytes = max(0, device_bytes - reserved_bytes - context_bytes)
    return {"context": context_bytes, "libraries": libraries_bytes, "allocator": reserved_bytes}
