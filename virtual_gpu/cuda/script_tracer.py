"""The tracer of a running script: device tensors are meta tensors that it knows, host tensors run as they are."""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from vramcast.virtual_gpu.allocator.allocator import MAIN_STREAM
from vramcast.virtual_gpu.cuda.assumptions import Assumptions
from vramcast.virtual_gpu.cuda.data_dependent import DYNAMIC, DynamicShapes
from vramcast.virtual_gpu.cuda.devices import META, is_meta
from vramcast.virtual_gpu.cuda.host_values import HostValues
from vramcast.virtual_gpu.cuda.operators import aten, operator_of, tensors_in
from vramcast.virtual_gpu.cuda.reading import Reader
from vramcast.virtual_gpu.cuda.several_devices import SeveralDevices
from vramcast.virtual_gpu.cuda.sparse import SparseOperators, is_sparse, storage_key
from vramcast.virtual_gpu.distributed.parallelism import NOT_DISTRIBUTED
from vramcast.virtual_gpu.replay.replay import FREE, Event
from vramcast.virtual_gpu.tracing.source_lines import place_now
from vramcast.virtual_gpu.tracing.trace import Call, Kernel, Tracer, Use, in_backward, size_of_call

_PLACED_FROM_BYTES = 2**14
"""Smaller blocks get no line of the user's code: finding it takes longer than the operator."""
_UNWRAPPED = "torchao."
"""Classes of tensors that hold others and have operators of their own: weights and states in few bits."""
_TAKE_HOST_TENSORS = ("aten::copy_", "aten::index", "aten::_index_put", "aten::_pack_padded", "aten::_pad_packed",
                      "aten::set_", "aten::_unsafe_index", "aten::_scaled_dot_product", "aten::_cudnn",
                      "aten::_to_copy", "aten::_efficient", "aten::_flash")  # fmt: skip


class _Local(threading.local):
    depth = 0
    """How many operators are running, one within the other: inside of one, device tensors are meta tensors."""
    operator = ""
    """The name of the operator that runs, or that ran last."""
    users_meta = 0
    """How many calls by which the script itself asks for the meta device are running."""


class ScriptTracer(Tracer):  # type: ignore[no-untyped-call]
    """Watches a script: traces what happens on the device, and leaves the host alone."""

    def __init__(self, kernels: dict[Any, Kernel], assumptions: Assumptions, nonzero_fraction: float) -> None:
        super().__init__(kernels)
        self.local = _Local()
        self.values = HostValues()
        self.assumptions = assumptions
        self.distributed: Callable[..., Any] | None = None
        """Runs the operators that only one of several ranks has."""
        self.operators = 0
        """How many operators the script has run."""
        self.source_lines: list[str | None] = []
        """The line of the user's code that block i was made for."""
        self.operator_names: list[str] = []
        """The operator that block i was made by."""
        self.several: SeveralDevices | None = None
        """The devices of a process that has more than one."""
        self.hollow: dict[int, Any] = {}
        """Host storages without data, by address: large parameters before they are moved."""
        self.ends_no_sequence: Callable[[], bool] = lambda: False
        """Tells whether tokens are chosen now: none of unknown ones ends its sequence."""
        self._unused: list[int] = []
        """Numbers of blocks that are no longer in the trace."""
        self._calls: dict[Call, int] = {}
        self._reader = Reader(self)
        self._dynamic = DynamicShapes(self, nonzero_fraction)
        self._special: dict[Any, Callable[[Any, Any], Any]] = {
            **SparseOperators(self).operators,
            **self._reader.operators,
            **self._usual_results(),
        }

    def connect(self, play: Callable[[Event], None]) -> None:
        """Send events to the memory of a device from now on."""
        self._emit = play

    @contextmanager
    def rehearsal(self) -> Iterator[list[Event]]:
        """Take what is allocated for a list of events that reach no device; what is alive afterwards is allocated."""
        events: list[Event] = []
        play = self._emit
        self._emit = events.append
        try:
            yield events
        finally:
            self._emit = play
            born = dict.fromkeys(block for block, size in events if block >= 0 and size != FREE)
            for key, (block, reference) in list(self._live.items()):
                storage = reference() if block in born else None
                if storage is not None:
                    del self._live[key]
                    self.adopt(storage, self.trace.uses[block])
            self.give_up(born)

    def is_device(self, tensor: Tensor) -> bool:
        """Return True for a tensor on the virtual GPU."""
        return is_meta(tensor) and storage_key(tensor) in self._live

    def is_hollow(self, tensor: Tensor) -> bool:
        """Return True for a host tensor without data."""
        return is_meta(tensor) and storage_key(tensor) in self.hollow

    def looks_like_device(self, tensor: Tensor) -> bool:
        """Return True for a device tensor, except for the code that runs one of its operators."""
        return not self.local.depth and is_meta(tensor) and storage_key(tensor) in self._live

    def looks_hollow(self, tensor: Tensor) -> bool:
        """Return True for a host tensor without data, except for the code that runs one of its operators."""
        return not self.local.depth and is_meta(tensor) and storage_key(tensor) in self.hollow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_silent():
            return func(*args, **(kwargs or {}))
        if self.distributed is not None:
            out = self.distributed(func, types, args, kwargs or {})
            if out is not NOT_DISTRIBUTED:
                return out
        if operator_of(func).is_composite and _skips_autograd(args, kwargs or {}):
            with self:
                return _taken_apart(func, args, kwargs or {})
        if torch._C._get_tracing_state() is not None:
            return self._without_graph(func, types, args, kwargs)
        local = self.local
        if types and any(kind.__module__.startswith(_UNWRAPPED) for kind in types):
            return NotImplemented  # the class runs the operator on the tensors that it holds, which come here again
        if not local.depth:
            local.operator = func._schema.name.removeprefix("aten::")
        local.depth += 1
        self.operators += 1
        try:
            return self._run(func, types, args, kwargs or {})
        finally:
            local.depth -= 1

    def _without_graph(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator that torch.jit.trace has recorded: while it records, sizes are tensors."""
        graphs: Any = torch._C
        state = graphs._get_tracing_state()
        graphs._set_tracing_state(None)
        try:
            return self.__torch_dispatch__(func, types, args, kwargs)
        finally:
            graphs._set_tracing_state(state)

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        tensors = tensors_in(args, kwargs)
        on_device = on_host = hollow = False
        for tensor in tensors:
            if is_meta(tensor):
                key = storage_key(tensor)
                on_device = on_device or key in self._live
                hollow = hollow or key in self.hollow
            elif tensor.dim():
                on_host = True
        device = kwargs.get("device")
        if device is not None and device.type == "meta" and self.local.users_meta:
            return func(*args, **kwargs)
        to_device = device is not None and (device.type == "cuda" or (device.type == "meta" and self._means_device()))
        if not on_device and not to_device:
            return self._on_host(func, args, kwargs, hollow, device)
        if on_device and on_host and not func._schema.name.startswith(_TAKE_HOST_TENSORS):
            self._check_same_device(func, tensors)
        if self.several is not None:
            with self.several.running(func, tensors, device):
                return self._run_on_device(func, types, args, kwargs, to_device)
        return self._run_on_device(func, types, args, kwargs, to_device)

    def _run_on_device(self, func: Any, types: Any, args: Any, kwargs: Any, to_device: bool) -> Any:
        special = self._special.get(func)
        if special is not None:
            out = special(args, kwargs)
            if out is not NotImplemented:
                return out
        return self._on_device(func, types, args, self._for_meta(kwargs, to_device))

    def _on_device(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        values = self.values.result(func, args, kwargs)
        if func in DYNAMIC:
            return self._dynamic.run(func, args, kwargs, values)
        out = self._traced(func, types, args, kwargs)
        if values is not None:
            self.values.keep_all(out, values)
        return out

    def _traced(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is aten._to_copy.default and not is_meta(args[0]) and self.phase is Use.ACTIVATIONS:
            self.phase = Use.INPUTS
            try:
                return Tracer.__torch_dispatch__(self, func, types, args, kwargs)
            finally:
                self.phase = Use.ACTIVATIONS
        return Tracer.__torch_dispatch__(self, func, types, args, kwargs)

    def _means_device(self) -> bool:
        """Return True where torch's own code asks for the device of a tensor, and not the script for 'meta'."""
        return not self.local.users_meta

    def _for_meta(self, kwargs: dict[str, Any], to_device: bool) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        if to_device:
            changes["device"] = META
        if kwargs.get("generator") is not None:
            changes["generator"] = None
        if kwargs.get("pin_memory"):
            changes["pin_memory"] = False
        return {**kwargs, **changes} if changes else kwargs

    def _on_host(self, func: Any, args: Any, kwargs: Any, hollow: bool, device: Any) -> Any:
        if not hollow:
            return func(*args, **kwargs)
        return self._reader.on_hollow(func, args, kwargs, device)

    def _check_same_device(self, func: Any, tensors: list[Tensor]) -> None:
        others = (item for item in tensors if not is_meta(item) and item.dim() and item.numel())
        if not all(getattr(item, "is_paged", False) for item in others):  # managed memory belongs to both
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
                f"(when checking arguments in {func})"
            )

    def _usual_results(self) -> dict[Any, Callable[[Any, Any], Any]]:
        """Return operators that ask whether numbers are sound: all of them are."""
        infinite = (float("inf"), float("-inf"))

        def said(func: Any, answer: bool, applies: Callable[[Any], bool]) -> Callable[[Any, Any], Any]:
            def run(args: Any, kwargs: Any) -> Any:
                if not applies(args) or self.values.of(args[0]) is not None:
                    return NotImplemented
                out = Tracer.__torch_dispatch__(self, func, (), args, kwargs)
                if out.numel() <= 2**20:
                    self.values.keep(out, torch.full(out.shape, answer, dtype=torch.bool))
                return out

            return run

        rules = (
            (aten.isnan.default, False, lambda args: True),
            (aten.isinf.default, False, lambda args: True),
            (aten.ne.Scalar, True, lambda args: args[1] in infinite),
            (aten.eq.Scalar, False, lambda args: args[1] in infinite),
            (aten.eq.Tensor, True, lambda args: args[0] is args[1] or self._are_drafts(args)),
            (aten.ne.Tensor, False, lambda args: args[0] is args[1]),
            (aten._is_all_true.default, True, lambda args: True),
            (aten._is_any_true.default, False, lambda args: True),
        )
        return {func: said(func, answer, applies) for func, answer, applies in rules}

    def _are_drafts(self, args: Any) -> bool:
        """Return True for two rows of tokens that are chosen now: those of an assistant are taken to be accepted."""
        one, other = args[:2]
        if not self.ends_no_sequence() or one.shape != other.shape or one.dim() != 2 or one.is_floating_point():
            return False
        return all(is_meta(item) and not self.values.has_part(item) for item in (one, other))

    def see(self, tensor: Tensor) -> Tensor:
        """Note the birth of a tensor's storage, unless it is known or lives on the host."""
        if not is_meta(tensor):
            return tensor
        if is_sparse(tensor):
            self.see(tensor._indices())
            self.see(tensor._values())
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata not in self._live:
            self.adopt(storage, Use.TEMPORARIES if in_backward() else self.phase)
        return tensor

    def adopt(self, storage: torch.UntypedStorage, use: Use) -> None:
        """Put a storage without data on the device until it dies."""
        is_elsewhere = self.several is not None and self.several.is_elsewhere
        self._hold(storage, None if is_elsewhere else self._birth(storage.nbytes(), use))

    def hand_over(self, block_owner: torch.UntypedStorage, storage: torch.UntypedStorage) -> None:
        """Let a storage without data have the block of another one."""
        block, reference = self._live[block_owner._cdata]
        self._live[block_owner._cdata] = (None, reference)
        several = self.several
        with several.moving_to(several.of_key(block_owner._cdata)) if several is not None else nullcontext():
            self._hold(storage, block)

    def _hold(self, storage: torch.UntypedStorage, block: int | None) -> None:
        key, live, values, emit, several = storage._cdata, self._live, self.values, self._emit, self.several
        if several is not None:
            several.add(key)

        def gone(_: Any) -> None:
            last = live.pop(key)[0]  # a resize may have replaced the block
            values.forget_storage(key)
            if several is not None:
                several.forget(key)
            if last is not None:
                emit((last, FREE))

        live[key] = (block, weakref.ref(storage, gone))

    def adopt_hollow(self, tensor: Tensor) -> Tensor:
        """Let a meta tensor pass for a host tensor whose values nobody knows."""
        storage = tensor.untyped_storage()
        key, hollow = storage._cdata, self.hollow

        def gone(_: Any) -> None:
            hollow.pop(key, None)

        if key not in hollow and key not in self._live:
            hollow[key] = weakref.ref(storage, gone)
        return tensor

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Note that a storage changed its size."""
        self.values.forget_storage(storage._cdata)
        if self.several is None or self.several.of_key(storage._cdata) == self.several.observed:
            super().resized(storage)

    def hold(self, library: str) -> None:
        """Record a block of a library, unless another device runs."""
        if self.several is None or not self.several.is_elsewhere:
            super().hold(library)

    def workspace(self, call: Call, use: Use = Use.WORKSPACE) -> None:
        """Record a block for a library call, unless another device runs."""
        if self.several is None or not self.several.is_elsewhere:
            super().workspace(call, use)

    def temporary(self, size_bytes: int) -> None:
        """Record a block of a kernel, unless another device runs."""
        if self.several is None or not self.several.is_elsewhere:
            super().temporary(size_bytes)

    def _try_algorithms(self, call: Call) -> None:
        """Follow the switch cudnn.benchmark, which a script may turn at any time."""
        if torch.backends.cudnn.benchmark:
            self._tried = self._tried if self._tried is not None else set()
            super()._try_algorithms(call)

    def _birth(self, size: int, use: Use) -> int:
        place = place_now() if size >= _PLACED_FROM_BYTES else None
        return self._born(size, use, self.owner, place, self.local.operator)

    def birth_like(self, size: int, block: int) -> int:
        """Allocate a block for what another one holds, which may be gone."""
        trace = self.trace
        place, operator = self.source_lines[block], self.operator_names[block]
        return self._born(size, Use(trace.uses[block]), trace.owners[block], place, operator)

    def _born(self, size: int, use: Use, owner: str, place: str | None, operator: str) -> int:
        trace = self.trace
        if self._unused:
            block = self._unused.pop()
            self.operator_names[block], self.source_lines[block] = operator, place
            trace.uses[block], trace.owners[block] = use, owner
        else:
            block = len(trace.uses)
            self.source_lines.append(place)
            self.operator_names.append(operator)
            trace.uses.append(use)
            trace.owners.append(owner)
        if self.stream != MAIN_STREAM:
            trace.streams[block] = self.stream
        self._emit((block, size))
        return block

    def _call(self, call: Call, use: Use = Use.WORKSPACE) -> int:
        """Record a block of a library; equal calls share an entry, so that a long run has few."""
        index = self._calls.setdefault(call, len(self.trace.calls))
        if index == len(self.trace.calls):
            self.trace.calls.append(call)
        return self._birth(size_of_call(index), use)

    def give_up(self, blocks: Iterable[int]) -> None:
        """Use the numbers of blocks again that are no longer in the trace."""
        for block in blocks:
            self.trace.streams.pop(block, None)
            self._unused.append(block)

    def mark(self, tensor: Tensor, use: Use, owner: str | None = None) -> None:
        """Say what a block holds, now that it is known."""
        entry = self._live.get(storage_key(tensor))
        if entry is not None and entry[0] is not None:
            self.trace.uses[entry[0]] = use
            if owner is not None:
                self.trace.owners[entry[0]] = owner


def _skips_autograd(args: Any, kwargs: Any) -> bool:
    """Return whether a call does not pass autograd, which takes composite operators apart."""
    return torch.is_inference_mode_enabled() or any(map(Tensor.is_inference, tensors_in(args, kwargs)))


def _taken_apart(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a composite operator as autograd would: by CUDA's path for tensors without data (operators/cuda_paths.py)."""
    has_path = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "AutogradMeta")
    if has_path and any(map(is_meta, tensors_in(args, kwargs))):
        return func._op_dk(torch._C.DispatchKey.AutogradMeta, *args, **kwargs)
    return func.decompose(*args, **kwargs)
