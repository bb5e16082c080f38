"""The storages of a network by its layer table: which layer makes, reads and keeps each.

Sizes are pairs: bytes for each sample, and bytes that do not depend on the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from vramcast.jobs.analysis.schedule.parameters import Shape, parameter_shapes
from vramcast.jobs.spec import NETWORK_INPUT, LayerRecord, LayerTable
from vramcast.virtual_gpu.training.setup import DTYPE_BYTES, TrainingSetup

Size = tuple[int, int]
"""Bytes of each sample, and bytes beside them."""
INPUT = 0
"""The storage of the network's input."""
TABLE_BATCH = 2
"""Samples in the batch that tables are recorded with: a share of one sample of what does not grow is its half."""
_KEEPS_OUTPUT = frozenset({"relu", "sigmoid", "tanh", "softmax", "log_softmax", "exp", "sqrt", "rsqrt"})
"""Kinds whose backward pass reads the output; others read their inputs (tools/autograd/derivatives.yaml)."""
_KEEPS_OWN = frozenset({"cross_entropy"})
"""Kinds that keep neither input nor output, but a tensor of their own: the logarithms of probabilities."""
_CLONES = frozenset({"relu6", "hardtanh", "silu", "swish", "hardswish", "mish", "gelu", "mul", "imul"})
"""Kinds that keep a clone of their input where they run in place, because the operation overwrites it."""
_KEEPS_NOTHING = frozenset(
    {"add", "iadd", "sub", "cat", "stack", "identity", "flatten", "dropout", "droppath", "mean", "sum", "neg",
     "embedding", "upsample", "interpolate", "where", "getitem", "expand", "repeat", "learnedpositions",
     "meanoversequence"}
)  # fmt: skip
_ATTENTION_COPIES = 6
"""Input, queries, keys, values, output and a copy of it, which an attention keeps."""
_INDEX_BYTES = 8
_SINGLE_BYTES = 4
_FUSED_ATTENTION = "scaled_dot_product_attention"
"""Tables are recorded in single precision, in which some calls have no fused kernel; in half precision all have."""
_WEIGHT_COPIES = 4
"""Forms of a weight that a convolution with standardised weights keeps, at most."""
_OTHER_BYTES = {"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "float64": 8}
_IN_HALF = ("linear", "conv", "attention", "matmul", "bmm", "einsum")
"""Parts of the names of kinds that autocast runs in half precision (aten/src/ATen/autocast_mode.h)."""
_IN_SINGLE = ("layernorm", "groupnorm", "softmax", "cross_entropy", "exp", "pow", "cumsum", "normalize")


@dataclass(slots=True)
class LayerNode:
    """One layer of a table."""

    record: LayerRecord
    kind: str
    """In lower case."""
    reads: tuple[int, ...]
    """Places of the layers whose outputs it reads, or NETWORK_INPUT."""
    storage: int
    """The storage of its output."""
    size: Size
    """Of its output, also where that shares the storage of an input."""
    makes: bool
    """False if its output is the storage of its input: a view, or an operation in place."""
    parameters: tuple[Shape, ...]
    needs_gradient: bool
    fixed: bool
    """True if it depends on parameters alone, so that its size does not grow with the batch."""
    keeps: tuple[int, ...] = ()
    """The storages that it is the first to keep for its backward pass."""
    inner: Size = (0, 0)
    """Tensors that it makes beside its output and keeps, such as a mask."""
    is_parameter: bool = False
    """True for parameters that belong to no layer that ran."""
    is_convolution: bool = False


@dataclass(frozen=True)
class Storages:
    """The nodes of a network, and its storages."""

    nodes: list[LayerNode]
    sizes: list[Size]
    last_reader: list[int]
    """The last node that reads or makes each storage in the forward pass."""
    saved: frozenset[int]
    """Those that a layer keeps for its backward pass."""
    last: int
    """The place of the node whose output the network returns."""
    input_elements: int

    def of(self, place: int) -> int:
        """Return the storage of a layer's output."""
        return INPUT if place == NETWORK_INPUT else self.nodes[place].storage


def storages_of(table: LayerTable, training: TrainingSetup) -> Storages:
    """Return the storages of a table's network in the dtypes of a training setup."""
    return _Walk(table, training).run()


class _Walk:
    """Assigns storages to the layers of a table in order."""

    def __init__(self, table: LayerTable, training: TrainingSetup) -> None:
        self.table = table
        self.full = DTYPE_BYTES[training.dtype]
        self.half = DTYPE_BYTES[training.autocast] if training.autocast else None
        self.nodes: list[LayerNode] = []
        self.sizes: list[Size] = [(table.input_elements * self.full, 0)]
        self.elements = [table.input_elements]
        self.saved = {INPUT}
        self.element_bytes: list[int] = []

    def run(self) -> Storages:
        for place, (record, shapes) in enumerate(zip(self.table.layers, parameter_shapes(self.table), strict=True)):
            self._add(place, record, shapes)
        readers = [0] * len(self.sizes)
        for place, node in enumerate(self.nodes):
            for read in node.reads:
                readers[self._of(read)] = place
            readers[node.storage] = max(readers[node.storage], place)
        last = max((place for place, node in enumerate(self.nodes) if not node.is_parameter), default=0)
        return Storages(self.nodes, self.sizes, readers, frozenset(self.saved), last, self.table.input_elements)

    def _of(self, place: int) -> int:
        return INPUT if place == NETWORK_INPUT else self.nodes[place].storage

    def _add(self, place: int, record: LayerRecord, shapes: tuple[Shape, ...]) -> None:
        kind = record.kind.lower()
        reads = self._reads(place, record)
        fixed = record.inputs is not None and all(read >= 0 and self.nodes[read].fixed for read in reads)
        other = _OTHER_BYTES.get(record.dtype or "")
        element_bytes = _SINGLE_BYTES if kind in _KEEPS_OWN else other or self._element_bytes(kind, reads)
        size = _size((record.activations or prod(record.output_shape)) * element_bytes, fixed)
        makes = bool(record.activations) or not reads
        if makes:
            self.sizes.append(size if record.activations else (0, 0))
            self.elements.append(record.activations)
        needs = not other and (bool(shapes) or any(read >= 0 and self.nodes[read].needs_gradient for read in reads))
        storage = len(self.sizes) - 1 if makes else self._of(reads[0])
        runs = bool(record.activations or record.output_shape or record.functional)
        node = LayerNode(
            record, kind, reads, storage, size, makes, shapes, needs, fixed,
            is_parameter=bool(record.parameters) and not runs,
            is_convolution="conv" in kind and kind != "conv1d" and bool(shapes) and runs,
        )  # fmt: skip
        self.nodes.append(node)
        self.element_bytes.append(element_bytes)
        if needs:
            self._keep(node, element_bytes)

    def _reads(self, place: int, record: LayerRecord) -> tuple[int, ...]:
        """Return the layers that a layer reads; a table that does not say so is read as a chain."""
        if record.inputs is not None:
            return record.inputs
        before = place - 1
        while before >= 0 and self.nodes[before].is_parameter:
            before -= 1
        return (before,)

    def _element_bytes(self, kind: str, reads: Sequence[int]) -> int:
        if self.half is None:
            return self.full
        if any(part in kind for part in _IN_SINGLE):
            return self.full
        if any(part in kind for part in _IN_HALF):
            return self.half
        return max((self.element_bytes[read] if read >= 0 else self.full for read in reads), default=self.full)

    def _keep(self, node: LayerNode, element_bytes: int) -> None:
        """Choose the storages that a layer is the first to keep; the rest of what it keeps are tensors of its own."""
        inputs = [self._of(read) for read in node.reads]
        ordered = [node.storage, *inputs] if node.kind in _KEEPS_OUTPUT else [*inputs, node.storage]
        free = [item for item in dict.fromkeys(ordered) if item not in self.saved and self.elements[item]]
        saved, other_bytes = node.record.saved, node.record.saved_fixed_bytes or 0
        if saved is None:
            saved, other_bytes = self._usually_saved(node, free)
        chosen: list[int] = []
        apart = node.kind in _KEEPS_OWN or (not node.makes and node.kind in _CLONES)
        if node.kind == _FUSED_ATTENTION and element_bytes < _SINGLE_BYTES:
            saved = min(saved, self._fused(node))
        copied = self._copied_in_half(node, element_bytes)
        if element_bytes < _SINGLE_BYTES and _converts(node.kind):  # its input in single precision, and the norm of it
            node.inner = (
                node.record.activations * _SINGLE_BYTES + max(saved - node.record.activations, 0) * element_bytes,
                0,
            )
            return
        for storage in () if apart else free:
            if storage in copied:
                saved = max(saved - self.elements[storage], 0)
            elif self.elements[storage] <= saved:
                chosen.append(storage)
                saved -= self.elements[storage]
        self.saved.update(chosen)
        node.keeps = tuple(chosen)
        per_sample, beside = _size(saved * element_bytes, node.fixed or _is_fixed(node, saved))
        node.inner = (per_sample + other_bytes, beside) if not node.fixed else (0, beside + TABLE_BATCH * other_bytes)
        if self.half is not None and self._runs_in_half(node, element_bytes):
            weight = sum(prod(shape) for shape in node.parameters if len(shape) > 1)
            inputs_bytes = sum(self.elements[item] for item in copied) * self.half
            node.inner = (node.inner[0] + inputs_bytes, node.inner[1] + weight * self.half)

    def _fused(self, node: LayerNode) -> int:
        """Return what flash attention keeps: its inputs, its output and a sum for each row; no scores."""
        inputs = {self._of(read) for read in node.reads}
        return (
            sum(self.elements[item] for item in inputs) + node.record.activations + prod(node.record.output_shape[:-1])
        )

    def _runs_in_half(self, node: LayerNode, element_bytes: int) -> bool:
        return element_bytes == self.half != self.full and any(part in node.kind for part in _IN_HALF)

    def _copied_in_half(self, node: LayerNode, element_bytes: int) -> set[int]:
        """Return the storages of which autocast gives a layer a copy in half precision, which the layer keeps."""
        if not node.parameters or not self._runs_in_half(node, element_bytes):
            return set()
        full = (read for read in node.reads if read < 0 or self.element_bytes[read] == self.full)
        return {self._of(read) for read in full}

    def _usually_saved(self, node: LayerNode, free: Sequence[int]) -> tuple[int, int]:
        """Return the elements and the other bytes that the kind of a layer keeps, for a table that does not say so."""
        kind, elements = node.kind, node.record.activations
        other_bytes = elements if "dropout" in kind else _INDEX_BYTES * elements if "maxpool" in kind else 0
        if kind in _KEEPS_NOTHING:
            return 0, other_bytes
        if "attention" in kind:
            return _ATTENTION_COPIES * elements, other_bytes
        count = 1 if kind in _KEEPS_OUTPUT else len(set(node.reads))
        return sum(self.elements[item] for item in free[:count]), other_bytes


def _converts(kind: str) -> bool:
    """Return whether a norm of a library converts its input to single precision; torch's own does so in its kernel."""
    return (kind.endswith("rmsnorm") and kind != "rmsnorm") or kind == "t5layernorm"


def _is_fixed(node: LayerNode, saved: int) -> bool:
    """Return whether what a layer keeps of its own does not grow with the batch: weights, statistics of channels."""
    if node.is_convolution:
        return TABLE_BATCH * saved <= _WEIGHT_COPIES * node.record.parameters
    return "batch" in node.kind and saved <= TABLE_BATCH * (node.record.output_shape or (0,))[0]


def _size(sample_bytes: int, fixed: bool) -> Size:
    return (0, TABLE_BATCH * sample_bytes) if fixed else (sample_bytes, 0)
