"""The backend `cuda`: measures specs on a GPU, with torch's counters in the child and with NVML in the parent."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from vramcast.child.messages import REFUSED
from vramcast.child.process import module_command
from vramcast.dataset_builder.backends._base import Backend, BackendResult
from vramcast.dataset_builder.backends.cuda.gpu_choice import (
    AUTO,
    OtherProcesses,
    candidates,
    claimed,
    free_gpus,
    visible_gpus,
)
from vramcast.dataset_builder.backends.cuda.memory_monitor import JobMemory, MemoryMonitor
from vramcast.dataset_builder.backends.cuda.protocol import ChildResult, MeasureRequest, is_out_of_memory
from vramcast.dataset_builder.backends.cuda.supervisor import ChildEnd, supervise
from vramcast.device.nvml import Gpu, Nvml, open_nvml
from vramcast.errors import UserError, check_choice, check_count
from vramcast.jobs.spec import Spec
from vramcast.virtual_gpu.allocator.options import AllocatorOptions
from vramcast.virtual_gpu.measurement import EVIDENCE_LENGTH, Measurement, Status

SLOWEST_INTERVAL_MS = 20
GONE_SECONDS = 5.0
"""Time for the driver to free the memory of a process that has ended."""
CHILD = tuple(module_command("vramcast.dataset_builder.backends.cuda.child"))
_CHANGES_MEMORY = (
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
"""Removed from the child's environment: they change the memory used, and a row does not record them."""


@dataclass(frozen=True, kw_only=True)
class CudaSettings:
    """Settings of the backend, from `conf/backend/cuda.yaml`."""

    gpu: str = AUTO
    """A UUID, the beginning of one, an index of nvidia-smi, or 'auto' for all that are visible and free."""
    interval_ms: int = 10
    timeout_seconds: float = 240
    """Limit for one child."""
    on_busy: str = "refuse"
    epochs: int = 2
    allocator: str = ""
    """Value of PYTORCH_CUDA_ALLOC_CONF."""

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
        AllocatorOptions.parse(self.allocator)  # otherwise torch would reject it in every child


@dataclass(frozen=True)
class _ChildRun:
    """The measurement of one child, and the versions that it reported."""

    measurement: Measurement
    versions: Mapping[str, str] = field(default_factory=dict)


class CudaBackend(Backend):
    """Trains each spec in a fresh child process on a GPU while a thread in this process polls NVML."""

    name = "cuda"
    origin = "measured"

    def __init__(
        self, settings: CudaSettings, estimator: Backend | None = None, command: Sequence[str] = CHILD
    ) -> None:
        self.settings = settings
        self.estimator = estimator
        """Its estimate limits the allocator in a second run; None for no second run."""
        self.command = tuple(command)
        runs = 1 if estimator is None else 2
        self.longest_seconds = settings.timeout_seconds * (runs + 1)  # waiting for the GPU may take as long as a run

    def lanes(self) -> list[Self]:
        """Return this backend for each GPU that is visible, allowed by the settings, and free."""
        with open_nvml() as nvml:
            gpus = candidates(visible_gpus(nvml, os.environ), self.settings.gpu)
            free = free_gpus(nvml, gpus, self._record)
        lanes = []
        for gpu, _ in free:
            lanes.append(type(self)(replace(self.settings, gpu=gpu.uuid), self.estimator, self.command))
            lanes[-1].device = gpu.name
        return lanes

    @property
    def _record(self) -> bool:
        return self.settings.on_busy == "record"

    def measure(self, spec: Spec) -> BackendResult:
        """Train a spec in a child; with an estimator, train it again with the estimate as memory limit."""
        start = time.perf_counter()
        with open_nvml() as nvml:
            gpus = candidates(visible_gpus(nvml, os.environ), self.settings.gpu)
            with claimed(nvml, gpus, self._record, self.settings.timeout_seconds) as (gpu, others):
                run = self._run(nvml, gpu, others, MeasureRequest(spec=spec, epochs=self.settings.epochs))
                measurement = replace(run.measurement, seconds=round(time.perf_counter() - start, 4))
                if measurement.status is Status.OK:
                    measurement = self._try_cap(nvml, gpu, others, spec, measurement)
            versions = {**nvml.versions(), **run.versions}
        return BackendResult(measurement, gpu.name, gpu.uuid, versions)

    def _try_cap(
        self, nvml: Nvml, gpu: Gpu, others: OtherProcesses, spec: Spec, measurement: Measurement
    ) -> Measurement:
        """Repeat the run with the estimate as memory limit, as xMem does, and record if it held."""
        estimate_bytes = _estimate(self.estimator, spec)
        if estimate_bytes is None:
            return measurement
        request = MeasureRequest(spec=spec, epochs=self.settings.epochs, cap_bytes=estimate_bytes)
        status = self._run(nvml, gpu, others, request).measurement.status
        # emptying the cache at the cap costs time only: the cap held
        held = {Status.OK: True, Status.CENSORED: True, Status.OOM: False}.get(status)
        return replace(measurement, cap_bytes=request.cap_bytes, cap_held=held)

    def _run(self, nvml: Nvml, gpu: Gpu, others: OtherProcesses, request: MeasureRequest) -> _ChildRun:
        context: list[JobMemory] = []

        def on_context(pid: int, event: Mapping[str, Any]) -> None:
            _check_identity(gpu, event.get("uuid"))
            monitor.identify(pid)
            context.append(monitor.job_memory())

        def check_monitor() -> None:
            if monitor.failure is not None:
                raise monitor.failure

        with MemoryMonitor(nvml, gpu, others, self.settings.interval_ms / 1000) as monitor:
            environment = child_environment(os.environ, gpu, self.settings.allocator)
            end = supervise(
                self.command, environment, request.to_json(), self.settings.timeout_seconds, on_context, check_monitor
            )
            check_monitor()
            monitor.wait_until_gone(GONE_SECONDS)
        result = _verdict(end, self.settings.timeout_seconds)
        if not context and result.status is Status.CRASHED:  # not caused by the spec: all others would fail as well
            raise UserError(
                f"expected a child process to reach its CUDA context, found that {result.evidence}: "
                "fix torch or the driver, or use backend=virtual, which needs no GPU"
            )
        return _ChildRun(_measurement(result, monitor, context[0] if context else None), result.versions)


def _estimate(estimator: Backend | None, spec: Spec) -> int | None:
    """Return an estimate of the reserved bytes; None without an estimator, or if it fails."""
    try:
        estimate = estimator.measure(spec).measurement if estimator else None
    except Exception:  # a failure of the estimator must not lose the measurement
        return None
    return estimate.reserved_bytes if estimate and estimate.status is Status.OK else None


def child_environment(environment: Mapping[str, str], gpu: Gpu, allocator: str) -> dict[str, str]:
    """Return the environment of a child: one GPU, and no variables that change memory."""
    inherited = {name: value for name, value in environment.items() if name not in _CHANGES_MEMORY}
    options = {"PYTORCH_CUDA_ALLOC_CONF": allocator} if allocator else {}
    return {**inherited, **options, "CUDA_VISIBLE_DEVICES": gpu.uuid}


def _check_identity(gpu: Gpu, uuid: str | None) -> None:
    """Raise UserError if CUDA uses another GPU than NVML; CUDA's names of MIG instances vary and are not checked."""
    if uuid is not None and not gpu.is_instance and gpu.uuid != f"GPU-{uuid}":
        raise UserError(
            f"expected CUDA to show {gpu.uuid}, found GPU-{uuid}: make sure that no library sets CUDA_VISIBLE_DEVICES"
        )


def _verdict(end: ChildEnd, timeout_seconds: float) -> ChildResult:
    """Return a child's result or, if it reported none, one derived from how it ended."""
    if end.result is not None and end.result["event"] == REFUSED:
        raise UserError(str(end.result.get("reason")))
    if end.timed_out:
        evidence = f"no result after {timeout_seconds:g} s" + (f": {end.output}" if end.output else "")
        return ChildResult(status=Status.TIMEOUT, evidence=evidence[:EVIDENCE_LENGTH])
    evidence = end.evidence
    if end.result is not None:
        try:
            return _censored_if_full(ChildResult.from_json(end.result))
        except ValueError as error:
            evidence = f"the child's answer is not a result ({error})"[:EVIDENCE_LENGTH]
    full = is_out_of_memory(end.output)  # a library may end the process instead of raising
    return ChildResult(status=Status.OOM if full else Status.CRASHED, evidence=evidence)


def _censored_if_full(result: ChildResult) -> ChildResult:
    """Mark a run that emptied the allocator's cache: its peak is the size of the GPU, not what the job needed."""
    if result.status is not Status.OK or not result.retries:
        return result
    evidence = f"the GPU was full: the allocator emptied its cache {result.retries} times"
    return replace(result, status=Status.CENSORED, evidence=evidence)


def _measurement(result: ChildResult, monitor: MemoryMonitor, context: JobMemory | None) -> Measurement:
    memory = monitor.job_memory()
    return Measurement(
        status=result.status,
        requested_bytes=result.requested_bytes,
        allocated_bytes=result.allocated_bytes,
        reserved_bytes=result.reserved_bytes,
        device_used_bytes=memory.most_bytes,
        breakdown=_breakdown(memory.most_bytes, result.reserved_bytes, context.most_bytes if context else None),
        evidence=result.evidence,
        process_bytes=memory.process_bytes,
        alone=monitor.alone,
        others_bytes=monitor.others_bytes,
        samples=monitor.samples,
        longest_gap_ms=round(1000 * monitor.longest_gap_seconds, 1),
    )


def _breakdown(device_bytes: int | None, reserved_bytes: int | None, context_bytes: int | None) -> dict[str, int]:
    """Split the device's peak into the bare context, libraries loaded since, and the allocator's reserve."""
    if context_bytes is None:
        return {}
    if device_bytes is None or reserved_bytes is None:
        return {"context": context_bytes}
    libraries_bytes = max(0, device_bytes - reserved_bytes - context_bytes)
    return {"context": context_bytes, "libraries": libraries_bytes, "allocator": reserved_bytes}
