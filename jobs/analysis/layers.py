"""The layer table of any module, recorded by hooks during one run on the meta device."""

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vramcast.jobs.spec import LayerRecord, LayerTable
from vramcast.virtual_gpu.operators.autocast import autocast_without_effect
from vramcast.virtual_gpu.tracing.owners import is_layer, named_parts
from vramcast.virtual_gpu.tracing.uncompiled import without_compiler

# Functions that move or rename existing data; memory layouts decide whether they copy.
_LAYOUT = frozenset({"reshape", "contiguous", "clone", "to", "float", "half", "bfloat16", "expand", "repeat", "pad"})


def layer_table(module: nn.Module, inputs: Sequence[Any], batch_size: int | None = None) -> LayerTable:
    """Run the module once on the given inputs (batch first) and record every layer and functional call.

    Pass both on the meta device, where nothing is computed. Pass `batch_size` if samples are not rows, as in graphs.
    """
    recorder = _LayerRecorder(module, inputs, batch_size)
    with ExitStack() as stack:
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
                self._add(name, type(part).__name__, output, before, self._parameters(part), functional=False)

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
                self.records.append(LayerRecord(name, type(part).__name__, (), 0, parameters))

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
        return output
