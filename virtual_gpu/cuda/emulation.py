"""A virtual GPU as a context: inside of it, torch sees one CUDA device that exists only in the simulation."""

import os
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from vramcast.errors import UserError
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.cuda import libraries
from vramcast.virtual_gpu.cuda.assumptions import Assumptions
from vramcast.virtual_gpu.cuda.devices import META, Device, ordinal_of
from vramcast.virtual_gpu.cuda.evaluation_growth import EvaluationGrowth
from vramcast.virtual_gpu.cuda.fast_forward import FastForward
from vramcast.virtual_gpu.cuda.host_values import MOST_FLOATS
from vramcast.virtual_gpu.cuda.patches import (
    Patches,
    accelerator,
    compiler,
    cuda_api,
    device_class,
    factories,
    loops,
    modules,
    profiler,
    saving,
    scripting,
    tensors,
    threads,
    wrappers,
)
from vramcast.virtual_gpu.cuda.phases import PhaseCoverage
from vramcast.virtual_gpu.cuda.run_record import RunRecord
from vramcast.virtual_gpu.cuda.script_memory import ScriptMemory
from vramcast.virtual_gpu.cuda.script_source import ScriptSource
from vramcast.virtual_gpu.cuda.script_tracer import ScriptTracer
from vramcast.virtual_gpu.cuda.several_devices import SeveralDevices
from vramcast.virtual_gpu.cuda.snapshot import snapshot_of
from vramcast.virtual_gpu.cuda.streams import Streams
from vramcast.virtual_gpu.cuda.trace_history import TraceHistory
from vramcast.virtual_gpu.operators.autocast import autocast_rules_in_thread
from vramcast.virtual_gpu.operators.cuda_paths import cuda_paths
from vramcast.virtual_gpu.operators.kernels import cuda_kernels
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.recordings.recorder import segments_of
from vramcast.virtual_gpu.replay.replay import FREE, Event
from vramcast.virtual_gpu.tracing.capability import RecordedCapability
from vramcast.virtual_gpu.tracing.trace import Use

if TYPE_CHECKING:
    from vramcast.virtual_gpu.compiled.session import CompileSession

_ALL_PATCHES = (
    tensors,
    factories,
    device_class,
    cuda_api,
    accelerator,
    threads,
    modules,
    loops,
    saving,
    compiler,
    scripting,
    wrappers,
    profiler,
    libraries,
)
_active: list["CudaEmulation"] = []
_BAD_FORK = (
    "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start "
    "method"
)


class CudaEmulation:
    """One virtual GPU in this process, described by a profile.

    Inside of the context `torch.cuda` is available, device tensors have shapes but no data, and an allocation that
    does not fit raises `torch.OutOfMemoryError`.

    Args:
        profile: The device.
        options: Settings of the caching allocator; by default those of PYTORCH_ALLOC_CONF.
        unbounded: Never run out of memory.
        nonzero_fraction: The part of its places that a mask with unknown values selects.
        index: The ordinal of the device, for a process of several ranks.
        device_count: How many devices the script sees.
        observed: The ordinal of the device whose memory is traced, where a process has several; None where it has one.
        stand_ins: Libraries that the script imports and that a stand-in replaces where they are absent.
        files_are_protected: Changes of files never reach the disk, so that checkpoints without data may be written.
        watches_source: Compile the user's modules with probes, so that their loops can end early.
        native_path: Returns where a path lies for code that opens files natively; None where it lies where it is named.
    """

    def __init__(
        self,
        profile: DeviceProfile,
        *,
        options: AllocatorOptions | None = None,
        unbounded: bool = False,
        nonzero_fraction: float = 1.0,
        index: int = 0,
        device_count: int = 1,
        observed: int | None = None,
        stand_ins: Sequence[str] = (),
        files_are_protected: bool = False,
        watches_source: bool = False,
        native_path: Callable[..., Any] | None = None,
    ) -> None:
        self.profile = profile
        self.device = torch.device("cuda", index)
        self.device_count = device_count
        self.nonzero_fraction = nonzero_fraction
        self.stand_ins = stand_ins
        self.assumptions = Assumptions()
        self.ranks: Any = None
        """Observes what makes ranks differ, once the script joins a process group of several."""
        self.saved: dict[str, Any] = {}
        """Checkpoints that this process keeps in the place of files, by absolute path."""
        self.unwritten: dict[str, None] = {}
        """Checkpoints that were not written, since their tensors have no data."""
        self.files_are_protected = files_are_protected
        self.native_path = native_path
        self.watches_source = watches_source
        self.capability = RecordedCapability(profile.compute_capability)
        self.tracer = ScriptTracer(cuda_kernels(), self.assumptions, nonzero_fraction)
        self.options = options or options_of_environment()
        self.memory = ScriptMemory(self.tracer.trace, profile, self.options, unbounded=unbounded)
        self.tracer.connect(self.memory.play)
        self.several = self.tracer.several = None if observed is None else SeveralDevices(device_count, observed)
        self.record = RunRecord(self.tracer)
        self.memory.watchers.append(self.record.note)
        self.tracer.ends_no_sequence = lambda: self.record.generating > 0 and not self.record.running
        self.source = ScriptSource()
        self.coverage = PhaseCoverage(self.record, self.source)
        self.growth = EvaluationGrowth(self.record, self.memory, self.assumptions, self._block)
        self.record.on_trained_call = self.growth.release
        self.forward = FastForward(self.record, self.coverage.expected, self.growth)
        self.record.on_optimizer_call = self.forward.note_step
        self.history = TraceHistory(self.tracer, self.memory, self.record)
        self.record.after_stretch.append(self.history.end_stretch)
        self.memory.after_oom.append(self.record.forget_batch)
        self.decodings: list[Any] = []
        """Generations that are running, outermost first."""
        self.runs_all_steps = False
        """Steps of a generation are run although they are known from the ones before."""
        self.streams = Streams(self.device, self.tracer)
        self.compiled: WeakSet[nn.Module] = WeakSet()
        """Networks that the script compiles and that run as eager code."""
        self.compiled_calls = 0
        """How many compiled functions are running."""
        self.compiler: Callable[[], CompileSession]
        """Returns the compiler of this run, which starts with its first use."""
        self.compile_notes: Callable[[], list[str]] = list
        """Returns what was compiled, and what was not."""
        self.on_forked_use: Callable[[], None] = lambda: None
        """Called in a forked process that uses the device."""
        self.callbacks = ExitStack()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if _active:
            raise UserError("expected one virtual GPU at a time, found another that is active: leave it first")
        with ExitStack() as stack:
            stack.enter_context(cuda_paths(self.capability))
            stack.enter_context(_lifting_host_tensors())
            patches = Patches()
            stack.callback(patches.undo)
            self.callbacks = stack.enter_context(ExitStack())
            for part in _ALL_PATCHES:
                part.apply(patches, self)
            Streams.active = self.streams
            _active.append(self)
            stack.callback(_active.remove, self)
            stack.enter_context(self.tracer)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """Enter the virtual GPU in another thread than the one that made it."""
        with autocast_rules_in_thread(), self.tracer:
            yield

    def after_fork(self) -> None:
        """Continue in a forked process, where CUDA does not work once the parent has used it."""
        self.memory.after_fork()
        was_used = bool(self.tracer.trace.events)

        def play(event: Event) -> None:
            if event[0] >= 0 and event[1] != FREE:
                self.on_forked_use()
                if was_used:
                    raise RuntimeError(_BAD_FORK)
            self.memory.play(event)

        self.tracer.connect(play)

    def hold_other_threads(self) -> None:
        """Stop all threads but this one at their next operator, for good."""
        self.tracer.__torch_dispatch__ = _wait_for_ever  # type: ignore[method-assign]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let code of this package run without being traced."""
        with _disable_current_modes():
            yield

    @contextmanager
    def users_meta(self) -> Iterator[None]:
        """Mark that the script itself asks for the meta device."""
        self.tracer.local.users_meta += 1
        try:
            yield
        finally:
            self.tracer.local.users_meta -= 1

    def in_compiled_code(self) -> bool:
        """Return True where code runs that the script has compiled."""
        return self.compiled_calls > 0 or any(module in self.compiled for module in self.record.running)

    def check_ordinal(self, device: Any) -> None:
        """Raise the error of CUDA for a device that is not there."""
        ordinal = ordinal_of(device)
        if self.several is not None:
            if ordinal is not None and not 0 <= ordinal < self.several.count:
                raise RuntimeError(
                    f"CUDA error: invalid device ordinal: found cuda:{ordinal} among {self.several.count} devices"
                )
        elif ordinal is not None and ordinal != self.device.index:
            raise RuntimeError(
                f"CUDA error: invalid device ordinal: expected cuda:{self.device.index}, found cuda:{ordinal}: "
                "a virtual GPU is one device in each process; --devices N gives a process several"
            )

    def resolved(self, device: Any) -> torch.device:
        """Return a device argument that names CUDA with its ordinal, after a check."""
        self.check_ordinal(device)
        return self.device if self.several is None else self.several.resolved(device)

    def device_of(self, tensor: Tensor) -> torch.device:
        """Return the device of a tensor that is on one."""
        return self.device if self.several is None else Device("cuda", self.several.of(tensor))

    def filled(self, tensor: Tensor) -> Tensor:
        """Return a host tensor with placeholders in the place of one without data."""
        return self.tracer._reader.filled(tensor)

    def address_of(self, storage: torch.UntypedStorage) -> int:
        """Return the address that the simulated allocator gave to a storage."""
        entry = self.tracer._live.get(storage._cdata)
        block = self.memory._blocks.get(entry[0]) if entry and entry[0] is not None else None
        return block.address if block is not None else storage._cdata

    def moved_storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return a storage on the device with the values of one on the host."""
        with self.users_meta():
            bare = torch.empty(storage.nbytes(), dtype=torch.uint8, device=META)
        moved = bare.untyped_storage()
        self.tracer.adopt(moved, Use.PARAMETERS)
        if storage.nbytes() <= MOST_FLOATS:
            self.tracer.values.keep(bare, torch.empty(0, dtype=torch.uint8).set_(storage))
        return moved

    def _block(self, size_bytes: int) -> Tensor:
        """Return a tensor of the device without use."""
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)

    def segments(self) -> list[dict[str, Any]]:
        """Return the segments as torch.cuda.memory_snapshot does."""
        return segments_of(self.memory.allocator, {})

    def snapshot(self) -> dict[str, Any]:
        """Return a snapshot of all that happened so far, in PyTorch's format."""
        tracer = self.tracer
        return snapshot_of(tracer.trace, tracer.source_lines, tracer.operator_names, self.profile, self.options)

    def write_snapshot(self, path: str | os.PathLike[str]) -> None:
        """Write a snapshot for https://pytorch.org/memory_viz; an old file stays until the new one is whole."""
        target = Path(path)
        part = target.with_name(f".{target.name[:200]}.{os.getpid()}.part")
        try:
            part.write_bytes(pickle.dumps(self.snapshot()))
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)

    def keep_checkpoint(self, checkpoint: Any, path: str | os.PathLike[str]) -> None:
        """Keep a checkpoint without data in this process, so that the script can load it again."""
        self.saved[str(Path(path).absolute())] = saving.described(self, checkpoint)
        self.note_unwritten(str(path))

    def note_unwritten(self, path: str) -> None:
        """Record a checkpoint that was kept from being written."""
        self.unwritten[path] = None


def _wait_for_ever(*_: Any, **__: Any) -> None:
    threading.Event().wait()


def options_of_environment() -> AllocatorOptions:
    """Return the allocator's settings in PYTORCH_ALLOC_CONF, or PYTORCH_CUDA_ALLOC_CONF."""
    text = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    return AllocatorOptions.parse(text)


@contextmanager
def _lifting_host_tensors() -> Iterator[None]:
    """Let torch.tensor make its tensor on the host first (torch/csrc/utils/tensor_new.cpp)."""
    torch._C._ensureCUDADeviceGuardSet()
    torch._C._set_only_lift_cpu_tensors(True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*CUDA is not available.*")
        try:
            yield
        finally:
            torch._C._set_only_lift_cpu_tensors(False)
