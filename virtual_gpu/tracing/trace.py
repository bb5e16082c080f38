"""Records a training step: every storage that is allocated on the device or freed, in order."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from vramcast.errors import UntraceableError
from vramcast.virtual_gpu.allocator.allocator import MAIN_STREAM
from vramcast.virtual_gpu.allocator.streams import RecordStream, StreamOperation
from vramcast.virtual_gpu.operators import int8_kernels
from vramcast.virtual_gpu.operators.shapes import SHAPES
from vramcast.virtual_gpu.replay.replay import EMPTY_CACHE, FREE, STREAM_OPERATION

_FIRST_CALL = -2


class Use(IntEnum):
    """The contents of a block, for the breakdown of a peak."""

    PARAMETERS = 0
    GRADIENTS = 1
    OPTIMIZER_STATE = 2
    ACTIVATIONS = 3
    TEMPORARIES = 4
    WORKSPACE = 5
    INPUTS = 6


@dataclass(frozen=True)
class ConvolutionCall:
    """A call of cuDNN, whose workspace depends on the device and its libraries."""

    direction: str
    """'forward', 'data' (the input's gradient) or 'weight' (the weight's gradient)."""
    x: tuple[int, ...]
    weight: tuple[int, ...]
    y: tuple[int, ...]
    stride: tuple[int, ...]
    groups: int
    padding: tuple[int, ...] = ()
    """Empty for none."""
    dilation: tuple[int, ...] = ()
    """Empty for none."""
    dtype: str = "float32"
    channels_last: bool = False

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors by name."""
        return {"x": self.x, "weight": self.weight, "y": self.y}

    @property
    def element_bytes(self) -> int:
        """Bytes of an element."""
        return getattr(torch, self.dtype).itemsize  # type: ignore[no-any-return]

    @property
    def is_depthwise(self) -> bool:
        """True if each channel is convolved separately."""
        return self.groups > 1 and self.weight[1] == 1


@dataclass(frozen=True)
class LibraryCall:
    """Memory that a library allocates at first use and holds."""

    library: str


@dataclass(frozen=True)
class ReductionCall:
    """A sum that torch may split among blocks if the device has room for more of them (see reductions.py)."""

    blocks: int
    """Number of blocks without a split."""
    threads: int
    """Threads per block."""
    values: int
    """Values that each thread adds, without a split."""
    bytes_a_split: int


@dataclass(frozen=True)
class SumCall:
    """A sum by the layout of its input, for traces at several batch sizes: each makes its own `ReductionCall` of it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dims: tuple[int, ...]
    element_bytes: int


@dataclass(frozen=True)
class SegmentsCall:
    """A buffer for the parts of the segments of an embedding's gradient, whose number is rounded (embedding.py)."""

    tokens: int
    segments: int
    bytes_a_part: int


@dataclass(frozen=True)
class AttentionCall:
    """The gradient of memory-efficient attention, whose tiles depend on the device (see attention.py)."""

    queries: tuple[int, ...]
    keys: int
    """Positions of the keys."""
    value_size: int
    """Size of a head of the values."""
    is_half: bool


Call = ConvolutionCall | LibraryCall | ReductionCall | SumCall | SegmentsCall | AttentionCall


@dataclass
class Trace:
    """Allocations and frees of blocks. A size that depends on the device is the index of a call, see `call_of`."""

    events: list[tuple[int, int]] = field(default_factory=list)
    uses: list[int] = field(default_factory=list)
    """The use of block i."""
    owners: list[str] = field(default_factory=list)
    """The layer of block i, '' if unknown."""
    calls: list[Call] = field(default_factory=list)
    approximations: set[str] = field(default_factory=set)
    """Assumptions of the trace, a phrase each."""
    has_batch_norm: bool = False
    """True if batch norm over images ran, which is cuDNN's on CUDA."""
    world_size: int = 1
    """Number of ranks of the run that the traced rank belongs to."""
    streams: dict[int, int] = field(default_factory=dict)
    """The stream of each block that is not on the main stream."""
    stream_operations: list[StreamOperation] = field(default_factory=list)
    """Operations that events refer to by index, see `STREAM_OPERATION`."""

    @property
    def has_convolutions(self) -> bool:
        """True if cuDNN is loaded."""
        return any(isinstance(call, ConvolutionCall) for call in self.calls)


def call_of(size: int) -> int | None:
    """Return the index of the call whose workspace an event allocates, or None for an ordinary event."""
    return _FIRST_CALL - size if size <= _FIRST_CALL else None


def size_of_call(index: int) -> int:
    """Return what stands for the size of the workspace of a call, the reverse of `call_of`."""
    return _FIRST_CALL - index


def in_backward() -> bool:
    """Return whether autograd is running a node: on CUDA it does so in a separate thread."""
    return torch._C._current_autograd_node() is not None


GUESSED_TRUTH = "a truth value was read from a tensor and taken as False"
"""A note of a trace. Networks of transformers check masks like that."""
ASSUMED_SELECTIONS = "masks with unknown values select the part of their places that was asked for"
"""A note of a trace, such as one of a mixture of experts whose routing is not known."""
_LARGEST_STAND_IN_BYTES = 2**28
"""Limit for the arguments of an operator without a meta function, which is run on zeros on the host."""


def without_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], approximations: set[str]) -> Any:
    """Run an operator on meta tensors: by a guess for truth values, by torch's meta function, or on zeros.

    Checks for bad values or full masks are usually false, so truth values are guessed; numbers cannot be guessed.
    """
    if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
        if args[0].dtype == torch.bool:
            approximations.add(GUESSED_TRUTH)
            return False
        raise UntraceableError(
            f"expected a training step whose shapes do not depend on data, found a number read from a tensor ({func}): "
            "measure this network on a GPU (backend=cuda), or keep to tensors (torch.where in the place of if)"
        )
    try:
        return func(*args, **kwargs)
    except NotImplementedError as error:
        out = _on_zeros(func, args, kwargs)
        if out is NotImplemented:
            raise UntraceableError(
                f"expected operators that torch can run without data, found {func}, which has no meta implementation: "
                "measure this network on a GPU (backend=cuda), or take the operator out of its training step"
            ) from error
        approximations.add(f"{func} has no meta function: its outputs are those for zeros")
        return out


def _on_zeros(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on zeros on the host; return NotImplemented if its result depends on the data."""
    tensors = [item for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
    if torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags:
        return NotImplemented
    if sum(item.untyped_storage().nbytes() for item in tensors) > _LARGEST_STAND_IN_BYTES:
        return NotImplemented
    args, kwargs = tree_map_only(Tensor, lambda item: torch.zeros(item.shape, dtype=item.dtype), (args, kwargs))
    try:
        return tree_map_only(Tensor, lambda item: item.to("meta"), func(*args, **kwargs))
    except (NotImplementedError, RuntimeError, IndexError):
        return NotImplemented


Kernel = Callable[["Tracer", tuple[Any, ...], dict[str, Any]], Any]


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records the storages which operators on meta tensors allocate and free.

    `kernels` stand for operators that allocate more on CUDA than their outputs. Blocks are numbered in the order of
    their allocation; an event of the size `FREE` ends a block.

    >>> import torch
    >>> tracer = Tracer({})
    >>> with tracer:
    ...     x = torch.ones(256, 256, device="meta")
    ...     y = x @ x
    ...     del x
    >>> tracer.trace.events
    [(0, 262144), (1, 262144), (0, -1)]

    Known limits: only tensors that pass through torch's dispatcher are seen, so memory that a custom CUDA kernel takes
    by itself is not. Values do not exist: a number that is read from a tensor raises `UntraceableError`, and a truth
    value is guessed, with a note. The order of frees is that of Python's reference counts in one thread.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from wrapping the class: the wrapper would import torch._dynamo, which takes seconds."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo compile code that runs under the tracer (torch/_dynamo/convert_frame.py)."""
        return True

    def __init__(self, kernels: dict[Any, Kernel], *, cudnn_benchmark: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._silent_thread: int | None = None
        self.trace = Trace()
        self._tried: set[Call] | None = set() if cudnn_benchmark else None
        self.phase = Use.ACTIVATIONS
        self.owner = ""
        self.postpones_sums = False
        """True if sums and segments are recorded as calls, so that traces at all batch sizes have the same events."""
        self._kernels = kernels
        self._live: dict[int, Any] = {}
        self._held: set[str] = set()
        self.stream = MAIN_STREAM
        """The current stream, which new blocks belong to."""
        self._emit: Callable[[tuple[int, int]], None] = self.trace.events.append

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Record nothing of what this thread runs: torch compiles a graph."""
        before, self._silent_thread = self._silent_thread, get_ident()
        try:
            yield
        finally:
            self._silent_thread = before

    def is_silent(self) -> bool:
        """Return whether this thread compiles a graph."""
        return self._silent_thread is not None and self._silent_thread == get_ident()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._silent_thread is not None and self.is_silent():
            return func(*args, **kwargs)
        kernel = self._kernels.get(func)
        if kernel is not None:
            out = kernel(self, args, kwargs)
            if out is not NotImplemented:
                return out
        elif func.namespace == int8_kernels.NAMESPACE:
            out = int8_kernels.int8_kernel(self, func, args, kwargs)
            if out is not NotImplemented:
                return out
        rule = SHAPES.get(func)
        out = rule(*args, **kwargs) if rule is not None else NotImplemented
        if out is NotImplemented:
            out = without_data(func, args, kwargs, self.trace.approximations)
        return self.see_all(out)

    def see_all(self, out: Any) -> Any:
        """Record the allocation of an operator's outputs: a tensor, or several, of which some may be None."""
        if isinstance(out, Tensor):
            self.see(out)
        elif isinstance(out, (tuple, list)):
            for item in out:
                if isinstance(item, Tensor):
                    self.see(item)
        return out

    def see(self, tensor: Tensor) -> Tensor:
        """Record the allocation of a tensor's storage, unless it is already recorded or on the host."""
        if not tensor.is_meta:
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata not in self._live:
            self._see_storage(storage)
        return tensor

    def _see_storage(self, storage: torch.UntypedStorage) -> None:
        key, emit, live = storage._cdata, self._emit, self._live

        def gone(_: Any) -> None:
            block = live.pop(key)[0]
            if block is not None:
                emit((block, FREE))

        block = self._birth(storage.nbytes(), Use.TEMPORARIES if in_backward() else self.phase)
        live[key] = (block, weakref.ref(storage, gone))

    def block_of(self, tensor: Tensor) -> int | None:
        """Return the block of a tensor."""
        entry = self._live.get(tensor.untyped_storage()._cdata)
        return entry[0] if entry else None

    def rename(self, blocks: Mapping[int, int | None]) -> None:
        """Give living storages other blocks, or none."""
        for key, (block, reference) in self._live.items():
            if block in blocks:
                self._live[key] = (blocks[block], reference)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage changed its size: the old block is freed and a new one allocated, none for size 0."""
        key, size_bytes = storage._cdata, storage.nbytes()
        if key in self._live:
            block, reference = self._live[key]
            if block is not None:
                self._emit((block, FREE))
            use = Use.TEMPORARIES if in_backward() else self.phase
            self._live[key] = (self._birth(size_bytes, use) if size_bytes else None, reference)
        elif size_bytes:
            self._see_storage(storage)

    def record_stream(self, tensor: Tensor, stream: int) -> None:
        """Record that another stream uses the block of a tensor."""
        block = self.block_of(tensor)
        if block is not None and stream != self.trace.streams.get(block, MAIN_STREAM):
            self.operate(RecordStream(block, stream))

    def operate(self, operation: StreamOperation) -> None:
        """Add a stream operation to the trace."""
        self.trace.stream_operations.append(operation)
        self._emit((STREAM_OPERATION, len(self.trace.stream_operations) - 1))

    def _birth(self, size: int, use: Use) -> int:
        block = len(self.trace.uses)
        if self.stream != MAIN_STREAM:
            self.trace.streams[block] = self.stream
        self.trace.uses.append(use)
        self.trace.owners.append(self.owner)
        self._emit((block, size))
        return block

    def temporary(self, size_bytes: int) -> None:
        """Record a block that a kernel allocates and frees."""
        block = self._birth(size_bytes, Use.TEMPORARIES)
        self._emit((block, FREE))

    def workspace(self, call: Call, use: Use = Use.WORKSPACE) -> None:
        """Record a block for the duration of one library call."""
        self._try_algorithms(call)
        block = self._call(call, use)
        self._emit((block, FREE))

    def held_call(self, call: Call) -> "HeldBlock":
        """Record a temporary block of a size that a call decides, which lives as long as the returned object."""
        return HeldBlock(self, self._call(call, Use.TEMPORARIES))

    def release(self, block: int) -> None:
        """Record the end of a block without a tensor."""
        self._emit((block, FREE))

    def _try_algorithms(self, call: Call) -> None:
        """Empty the cache after the first call of a kind, as the trials of cudnn.benchmark do.

        native/cudnn/Conv_v8.cpp, run_single_conv. Depthwise convolutions in NCHW run in torch's own kernel. The
        workspaces of the trials are freed within the call: a monitor that samples once a second mostly misses them.
        """
        if self._tried is None or not isinstance(call, ConvolutionCall) or call in self._tried:
            return
        if call.is_depthwise and not call.channels_last:
            return
        self._tried.add(call)
        self._emit(EMPTY_CACHE)

    def hold(self, library: str) -> None:
        """Record a block that a library allocates at its first use in a thread and holds."""
        key = f"{library} {'backward' if in_backward() else 'forward'} {self.stream}"
        if key not in self._held:
            self._held.add(key)
            self._call(LibraryCall(library))

    def _call(self, call: Call, use: Use = Use.WORKSPACE) -> int:
        self.trace.calls.append(call)
        return self._birth(size_of_call(len(self.trace.calls) - 1), use)


class HeldBlock:
    """A block without a tensor, which ends with this object."""

    def __init__(self, tracer: Tracer, block: int) -> None:
        self.tracer = tracer
        self.block = block

    def __del__(self) -> None:
        self.tracer.release(self.block)
