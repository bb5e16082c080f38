"""The layer table of any module, recorded by hooks during one run on the meta device."""

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vramcast.jobs.analysis.data_flow import DataFlow
from vramcast.jobs.spec import LayerRecord, LayerTable
from vramcast.virtual_gpu.operators.autocast import autocast_without_effect
from vramcast.virtual_gpu.operators.cuda_paths import cuda_paths
from vramcast.virtual_gpu.operators.kernels import cuda_kernels
from vramcast.virtual_gpu.tracing.owners import is_layer, named_parts
from vramcast.virtual_gpu.tracing.trace import Tracer
from vramcast.virtual_gpu.tracing.uncompiled import without_compiler
from vramcast.virtual_gpu.training.loop import stored_tensors

# Functions that move or rename existing data; memory layouts decide whether they copy.
_LAYOUT = frozenset({"reshape", "contiguous", "clone", "to", "float", "half", "bfloat16", "expand", "repeat", "pad"})


def layer_table(module: nn.Module, inputs: Sequence[Any], batch_size: int | None = None) -> LayerTable:
    """Run the module once on the given inputs (batch first) and record every layer and functional call.

    Pass both on the meta device, where nothing is computed. Pass `batch_size` if samples are not rows, as in graphs.
    """
    return _recorded(_LayerRecorder(module, inputs, batch_size), module, inputs)


def detailed_table(module: nn.Module, inputs: Sequence[Any], batch_size: int | None = None) -> LayerTable:
    """Return the layer table with all fields of its layers; the module takes CUDA's paths, as in a trace.

    Both must be on the meta device. `saved` is the share of one sample in all that a layer saves for the batch, so
    that what does not grow with the batch counts in part.
    """
    tracer = Tracer(cuda_kernels())
    with cuda_paths(), tracer:
        return _recorded(_DetailedRecorder(module, inputs, batch_size), module, inputs)


def _recorded(recorder: "_LayerRecorder", module: nn.Module, inputs: Sequence[Any]) -> LayerTable:
    with ExitStack() as stack:
        stack.enter_context(recorder.watching())
        for name, part in named_parts(module):
            stack.enter_context(recorder.on(name, part))
        stack.enter_context(without_compiler())
        stack.enter_context(autocast_without_effect())
        stack.enter_context(recorder)
        try:
            module(*inputs)
        except Exception as error:
            if recorder.running:
                error.add_note(f"in the layer {recorder.running!r}")
            raise
    recorder.add_unseen(module)
    trainable = tuple(tuple(item.shape) for item in module.parameters() if item.requires_grad)
    return LayerTable(tuple(recorder.records), trainable, recorder.input_elements)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _storages(value: Any) -> dict[int, int]:
    """Return the storages of all tensors in a value, with their elements."""
    storages = ((tensor.untyped_storage(), tensor.element_size()) for tensor in _tensors(value))
    return {storage._cdata: storage.nbytes() // size for storage, size in storages}


class _LayerRecorder(TorchFunctionMode):
    """Records layers by hooks, and functions that are called outside of layers."""

    def __init__(self, module: nn.Module, inputs: Sequence[Any], batch_size: int | None) -> None:
        super().__init__()
        self.records: list[LayerRecord] = []
        tensors = list(_tensors(inputs))
        self.batch_size = batch_size or (tensors[0].shape[0] if tensors and tensors[0].dim() else 1)
        self.input_elements = sum(tensor.numel() for tensor in tensors) // self.batch_size
        self._owned = _storages([*module.parameters(), *module.buffers()]).keys()
        self._counted: set[int] = set()  # parameters of earlier layers
        self._layers = 0  # number of nested layers that are running
        self._path: list[str] = [""]  # modules that are running, outermost first
        self._before: list[Set[int]] = []

    @property
    def running(self) -> str:
        """The innermost module that is running."""
        return self._path[-1]

    def watching(self) -> AbstractContextManager[None]:
        """Return the context of the run."""
        return nullcontext()

    @contextmanager
    def on(self, name: str, part: nn.Module) -> Iterator[None]:
        """Record one module while the context is open."""
        whole = is_layer(part)

        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._layers += whole
            self._path.append(name)
            self._before.append(_storages([args, kwargs]).keys())

        def leave(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._layers -= whole
            self._path.pop()
            before = self._before.pop()
            if whole and not self._layers:
                self._add_layer(name, part, output, before)

        handles = (
            part.register_forward_pre_hook(enter, with_kwargs=True),
            part.register_forward_hook(leave, with_kwargs=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def add_unseen(self, module: nn.Module) -> None:
        """Record parameters that no layer has: a class token, or a weight that is used without its module."""
        for name, part in named_parts(module):
            parameters = self._parameters(part, recurse=False)
            if parameters:
                self._add_unseen(name, type(part).__name__, parameters)

    def _add_unseen(self, name: str, kind: str, parameters: int) -> None:
        self.records.append(LayerRecord(name, kind, (), 0, parameters))

    def _add_layer(self, name: str, part: nn.Module, output: Any, before: Set[int]) -> None:
        self._add(name, type(part).__name__, output, before, self._parameters(part), functional=False)

    def _parameters(self, part: nn.Module, recurse: bool = True) -> int:
        """Return the elements of the parameters that no earlier layer shares."""
        sizes = {id(item): item.numel() for item in part.parameters(recurse) if id(item) not in self._counted}
        self._counted |= sizes.keys()
        return sum(sizes.values())

    def _add(self, name: str, kind: str, output: Any, before: Set[int], parameters: int, functional: bool) -> None:
        tensors = list(_tensors(output))
        if not tensors:
            return
        shape = tuple(tensors[0].shape[1:])
        activations = self._fresh(tensors, before) // self.batch_size
        self.records.append(LayerRecord(name, kind, shape, activations, parameters, functional))

    def _fresh(self, output: Any, before: Set[int]) -> int:
        """Return the elements of an output's new storages: neither those of the inputs nor of the module."""
        storages = _storages(output).items()
        return sum(elements for key, elements in storages if key not in before and key not in self._owned)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._layers:
            return func(*args, **kwargs)
        before = _storages([args, kwargs]).keys()
        with torch._C.DisableTorchFunction():
            output = func(*args, **kwargs)
        kind = getattr(func, "__name__", "").strip("_")
        if kind not in _LAYOUT and self._fresh(output, before):
            self._add(self._path[-1], kind, output, before, 0, functional=True)
        else:
            self._pass_on(output, before)
        return output

    def _pass_on(self, output: Any, before: Set[int]) -> None:
        """See an operation that is not recorded."""


class _DetailedRecorder(_LayerRecorder):
    """Also records the fields that need the module and its data."""

    def __init__(self, module: nn.Module, inputs: Sequence[Any], batch_size: int | None) -> None:
        super().__init__(module, inputs, batch_size)
        owned = [part for item in (*module.parameters(), *module.buffers()) for part in stored_tensors(item)]
        self._flow = DataFlow(_tensors(inputs), owned, self.batch_size)
        self._own: dict[str, int] = {}
        """The fields about parameters of the last module that was asked for its own."""

    def watching(self) -> AbstractContextManager[None]:
        """Watch what the run saves for the backward pass."""
        return self._flow.watching_saved()

    def add_unseen(self, module: nn.Module) -> None:
        """Count what was saved after the last layer for it, and record parameters that no layer has."""
        if self.records:
            floats, other_bytes = self._flow.take_saved()
            last = self.records[-1]
            self._complete(
                saved=(last.saved or 0) + floats, saved_fixed_bytes=(last.saved_fixed_bytes or 0) + other_bytes
            )
        super().add_unseen(module)

    def _add_unseen(self, name: str, kind: str, parameters: int) -> None:
        super()._add_unseen(name, kind, parameters)
        self._complete(inputs=(), saved=0, saved_fixed_bytes=0, **self._own)

    def _complete(self, **fields: Any) -> None:
        self.records[-1] = replace(self.records[-1], **fields)

    def _parameters(self, part: nn.Module, recurse: bool = True) -> int:
        own = [item for item in part.parameters(recurse) if id(item) not in self._counted]
        stored = (inner for item in own for inner in stored_tensors(item))
        self._own = {
            "trainable": sum(item.numel() for item in own if item.requires_grad),
            "parameter_bytes": sum(item.numel() * item.element_size() for item in stored),
        }
        return super()._parameters(part, recurse)

    def _add_layer(self, name: str, part: nn.Module, output: Any, before: Set[int]) -> None:
        count = len(self.records)
        super()._add_layer(name, part, output, before)
        if len(self.records) > count:
            self._complete(**self._own, **_window(part))

    def _add(self, name: str, kind: str, output: Any, before: Set[int], parameters: int, functional: bool) -> None:
        count = len(self.records)
        super()._add(name, kind, output, before, parameters, functional)
        if len(self.records) == count:
            return
        tensors = list(_tensors(output))
        sources = self._flow.sources(before)
        floats, other_bytes = self._flow.take_saved()
        self._complete(
            inputs=None if sources is None else tuple(sorted(sources)),
            dtype=str(tensors[0].dtype).removeprefix("torch."),
            saved=floats,
            saved_fixed_bytes=other_bytes,
            trainable=0,
            parameter_bytes=0,
        )
        self._flow.made_by(count, tensors)

    def _pass_on(self, output: Any, before: Set[int]) -> None:
        self._flow.passed(before, _tensors(output))


def _window(part: nn.Module) -> dict[str, Any]:
    """Return the kernel, stride and groups of a convolution or pooling."""
    named = {"kernel": getattr(part, "kernel_size", None), "stride": getattr(part, "stride", None)}
    window = {name: sizes for name, value in named.items() if (sizes := _sizes(value))}
    groups = getattr(part, "groups", None)
    return {**window, "groups": groups} if "kernel" in window and isinstance(groups, int) else window


def _sizes(value: Any) -> tuple[int, ...]:
    """Return a number or several as a tuple, empty for anything else."""
    values = value if isinstance(value, tuple | list) else (value,)
    return tuple(values) if all(isinstance(item, int) and not isinstance(item, bool) for item in values) else ()
