"""The events of one forward and backward pass, for any batch.

The schedule follows autograd: an output lives until its last reader is done, or, if it is kept, until the backward pass
of the first layer that keeps it. A later gradient is added to the first in place if nothing else holds that one.
"""

from dataclasses import dataclass, field
from math import prod

from vramcast.jobs.analysis.schedule.checkpointed import checkpointed_segments
from vramcast.jobs.analysis.schedule.storages import INPUT, LayerNode, Size, Storages
from vramcast.jobs.analysis.schedule.workspaces import Call, calls_of
from vramcast.jobs.spec import NETWORK_INPUT
from vramcast.virtual_gpu.training.setup import DTYPE_BYTES, TrainingSetup

_PASSES = frozenset({"add", "iadd", "sub", "cat", "identity", "flatten", "droppath"})
"""Kinds whose inputs get the gradient that they get."""
_IN_PLACE = frozenset(
    {"relu", "relu6", "silu", "hardswish", "hard_swish", "leakyrelu", "leaky_relu", "elu", "selu", "gelu",
     "hardsigmoid", "sigmoid", "tanh", "hardtanh", "mish", "softplus", "mul", "imul", "div", "masked_fill"}
)  # fmt: skip
"""Kinds that make a gradient also where they run in place."""
_ATTENTION_TEMPORARIES = 4
"""Gradients of queries, keys and values, and of the accumulated queries, in sizes of the output."""


@dataclass
class Events:
    """Allocations and frees by local numbers of blocks, with symbolic sizes."""

    blocks: list[int] = field(default_factory=list)
    sizes: list[Size | None] = field(default_factory=list)
    """None for a free."""
    calls: dict[int, Call] = field(default_factory=dict)
    """The calls whose workspaces events allocate, by the index of the event."""


@dataclass
class Pass:
    """The events of a batch. `forward` ends before the output of the previous batch is freed."""

    forward: Events
    backward: Events
    blocks: int
    output: int | None
    """The block of the output, which lives until the next output is there."""
    gradients: list[tuple[int, Size]]
    """Blocks of the parameters' gradients, which live until they are dropped."""


class _Gradient:
    """A gradient, with the number of places that hold it."""

    __slots__ = ("block", "holders")

    def __init__(self, block: int) -> None:
        self.block = block
        self.holders = 1


class PassWriter:
    """Writes the events of one batch of a network."""

    def __init__(self, storages: Storages, training: TrainingSetup) -> None:
        self.storages = storages
        self.training = training
        self._events = Events()
        self._count = 0
        self._live: dict[int, int] = {}  # block by storage
        self._inner: dict[int, int] = {}  # block by node
        self._gradients: dict[int, _Gradient] = {}  # by node
        self._of_parameters: list[tuple[int, Size]] = []
        self._calls: dict[int, dict[str, Call]] = {}
        names = [node.record.name for node in storages.nodes[: storages.last + 1]]
        self._segments = checkpointed_segments(names) if training.checkpointing else {}
        self._returned = self._returned_storage()

    def write(self) -> Pass:
        """Return the events."""
        nodes, last = self.storages.nodes, self.storages.last
        for place in range(last + 1):
            self._forward(place, nodes[place])
        forward, self._events = self._events, Events()
        self._loss(nodes[last])
        for place in range(last, -1, -1):
            if place in self._segments:
                self._recompute(self._segments[place], place)
            self._backward(place, nodes[place])
        for node in nodes:
            if node.is_parameter:
                self._parameter_gradients(node, 0)
        output = self._end()
        return Pass(forward, self._events, self._count, output, self._of_parameters)

    def _returned_storage(self) -> int:
        """Return the storage of the output; beside its own loss, a network returns the scores that it comes from."""
        node = self.storages.nodes[self.storages.last]
        if self.training.loss != "own" or not node.reads:
            return node.storage
        sizes = self.storages.sizes
        return max((self.storages.of(read) for read in node.reads), key=sizes.__getitem__)

    def _new(self, size: Size) -> int:
        block = self._count
        self._count = block + 1
        self._events.blocks.append(block)
        self._events.sizes.append(size)
        return block

    def _free(self, block: int) -> None:
        self._events.blocks.append(block)
        self._events.sizes.append(None)

    def _brief(self, size: Size) -> None:
        self._free(self._new(size))

    def _workspace(self, place: int, direction: str) -> None:
        if place not in self._calls:
            self._calls[place] = calls_of(self.storages, self.storages.nodes[place], self.training)
        call = self._calls[place].get(direction)
        if call is not None:
            self._events.calls[len(self._events.blocks)] = call
            self._brief((0, 0))

    # forward

    def _forward(self, place: int, node: LayerNode) -> None:
        if node.is_parameter:
            return
        if node.makes:
            self._live[node.storage] = self._new(self.storages.sizes[node.storage])
        if node.inner != (0, 0):
            self._inner[place] = self._new(node.inner)
        if node.is_convolution:
            self._workspace(place, "forward")
        for storage in {*map(self.storages.of, node.reads), node.storage}:
            if self.storages.last_reader[storage] == place and storage not in self.storages.saved:
                self._drop(storage)
        start = self._segments.get(place)
        if start is not None:
            self._forget(start, place)

    def _drop(self, storage: int) -> None:
        if storage not in (INPUT, self._returned) and storage in self._live:
            self._free(self._live.pop(storage))

    def _forget(self, start: int, end: int) -> None:
        """Free what the layers of a checkpointed segment keep; its output stays."""
        nodes = self.storages.nodes
        for place in range(start, end + 1):
            if nodes[place].storage != nodes[end].storage and self.storages.last_reader[nodes[place].storage] <= end:
                self._drop(nodes[place].storage)
            if place in self._inner:
                self._free(self._inner.pop(place))

    def _recompute(self, start: int, end: int) -> None:
        """Run the forward pass of a segment again, and keep what it keeps."""
        nodes = self.storages.nodes
        for place in range(start, end + 1):
            node = nodes[place]
            if node.makes and node.storage not in self._live:
                self._live[node.storage] = self._new(self.storages.sizes[node.storage])
            if node.inner != (0, 0):
                self._inner[place] = self._new(node.inner)
            for storage in {*map(self.storages.of, node.reads), node.storage}:
                if start <= self.storages.last_reader[storage] == place and storage not in self.storages.saved:
                    self._drop(storage)

    # backward

    def _loss(self, node: LayerNode) -> None:
        if self.training.loss == "own":
            self._gradients[self.storages.last] = _Gradient(self._new(node.size))
            return
        targets = self._new(node.size)  # the logarithms of probabilities, or the targets
        made = self._new(node.size)
        if self.training.loss == "cross_entropy":
            before, made = made, self._new(node.size)
            self._free(before)
        self._free(targets)
        self._gradients[self.storages.last] = _Gradient(made)

    def _backward(self, place: int, node: LayerNode) -> None:
        gradient = self._gradients.pop(place, None)
        if gradient is not None:
            if node.needs_gradient:
                self._send(place, node, gradient)
                self._parameter_gradients(node, place)
            self._release(gradient)
        for storage in node.keeps:
            self._drop(storage)
        if place in self._inner:
            self._free(self._inner.pop(place))

    def _parameter_gradients(self, node: LayerNode, place: int) -> None:
        element_bytes = DTYPE_BYTES[self.training.dtype]
        for index, shape in enumerate(node.parameters):
            size = (0, prod(shape) * element_bytes)
            self._of_parameters.append((self._new(size), size))
            if index == 0 and node.is_convolution:
                self._workspace(place, "weight")

    def _send(self, place: int, node: LayerNode, gradient: _Gradient) -> None:
        """Give each input its gradient."""
        passes = node.kind in _PASSES or (not node.makes and node.kind not in _IN_PLACE)
        for read in node.reads:
            if read == NETWORK_INPUT or not self.storages.nodes[read].needs_gradient:
                continue
            size = self.storages.nodes[read].size
            if passes and (size == node.size or node.kind == "cat"):
                gradient.holders += 1
                self._deliver(read, gradient)
            else:
                self._deliver(read, self._made_gradient(place, node, size))

    def _made_gradient(self, place: int, node: LayerNode, size: Size) -> _Gradient:
        if node.kind == "cross_entropy":  # that of the logarithms comes first
            first = self._new(size)
            made = _Gradient(self._new(size))
            self._free(first)
            return made
        made = _Gradient(self._new(size))
        if node.is_convolution:
            self._workspace(place, "data")
        if "attention" in node.kind:
            self._brief((_ATTENTION_TEMPORARIES * node.size[0], 0))
        if node.kind in ("prelu", "softmax"):  # the weight's gradient before its sum; the product with the output
            self._brief(size)
        return made

    def _deliver(self, place: int, gradient: _Gradient) -> None:
        before = self._gradients.get(place)
        if before is None:
            self._gradients[place] = gradient
        elif before.holders == 1:
            self._release(gradient)
        else:
            self._gradients[place] = _Gradient(self._new(self.storages.nodes[place].size))
            self._release(before)
            self._release(gradient)

    def _release(self, gradient: _Gradient) -> None:
        gradient.holders -= 1
        if not gradient.holders:
            self._free(gradient.block)

    def _end(self) -> int | None:
        """Free what no gradient reached, and return the block of the output."""
        output = self._live.pop(self._returned, None)
        for blocks in (self._live, self._inner):
            for block in blocks.values():
                self._free(block)
        for gradient in self._gradients.values():
            self._release(gradient)
        return output
