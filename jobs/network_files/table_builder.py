"""Builds a layer table from the operations of a graph, as `jobs/analysis/layers` records one from a run."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from vramcast.errors import UserError
from vramcast.jobs.network_files.kept_tensors import kept_by
from vramcast.jobs.network_files.limits import OPERATIONS, shown
from vramcast.jobs.spec import NETWORK_INPUT, LayerRecord, LayerTable

Shape = tuple[int, ...]
FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
BYTES: Mapping[str, int] = {"float64": 8, "int64": 8, "float16": 2, "bfloat16": 2, "int16": 2, "bool": 1, "uint8": 1,
                            "int8": 1}  # fmt: skip


def bytes_of(dtype: str) -> int:
    """Return the size of an element."""
    return BYTES.get(dtype, 4)


@dataclass(frozen=True)
class Parameter:
    """A parameter of the network."""

    name: str
    shape: Shape
    trainable: bool = True
    dtype: str = "float32"

    @property
    def elements(self) -> int:
        """The number of its elements."""
        return prod(self.shape)


@dataclass
class _Storage:
    """The memory of a value and its views."""

    elements: int
    dtype: str
    is_kept: bool
    """True once it is counted among what backward passes keep, and for inputs and parameters from the start."""


@dataclass
class _Value:
    storage: _Storage
    makers: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Operation:
    """An operation of a graph, with its first output."""

    name: str
    """Of the module that it belongs to, or its own."""
    kind: str
    """Class of the module, or name of the function."""
    formula: str
    """The name of ATen's operation, by which autograd keeps tensors."""
    reads: Sequence[str]
    writes: str
    shape: Shape
    """Of the output, with the batch."""
    dtype: str = "float32"
    module: bool = False
    """True if it belongs to a layer: consecutive operations of one layer are one row of the table."""
    fresh: bool = True
    """False for a view, or an operation in place."""
    recorded: bool = True
    """False if it makes no row unless it belongs to a layer: a view, or a copy into another layout."""
    parameters: Sequence[Parameter] = ()
    window: Mapping[str, Any] = field(default_factory=dict)
    """Kernel, stride and groups."""


class TableBuilder:
    """Takes operations in the order of execution."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = max(batch_size, 1)
        self._values: dict[str, _Value] = {}
        self._records: list[LayerRecord] = []
        self._counted: dict[str, Parameter] = {}
        self._open: str | None = None
        """The layer of the last row, if further operations may belong to it."""
        self._input_elements = 0
        self._operations = 0

    def add_input(self, name: str, shape: Shape, dtype: str) -> None:
        """Add an input of the network."""
        self._input_elements += prod(shape) // self.batch_size
        self._values[name] = _Value(_Storage(prod(shape), dtype, is_kept=True), frozenset({NETWORK_INPUT}))

    def add(self, operation: Operation) -> None:
        """Add an operation, whose inputs are outputs of earlier ones; names that nobody made are constants."""
        self._operations += 1
        if self._operations > OPERATIONS:
            raise UserError(f"expected at most {OPERATIONS} operations, found more: name a smaller network")
        reads = [self._values[name] for name in operation.reads if name in self._values]
        output = self._output(operation, reads)
        floats, fixed_bytes = self._keep(operation, reads, output)
        recorded = operation.module or operation.recorded
        if recorded and operation.module and self._open == operation.name and self._records:
            place = self._extend(operation, output, _makers_of(reads), floats, fixed_bytes)
        elif recorded:
            place = self._record(operation, output, _makers_of(reads), floats, fixed_bytes)
        else:
            self._add_saved(floats, fixed_bytes)
            self._values[operation.writes] = _Value(output, reads[0].makers if reads else frozenset())
            return
        self._open = operation.name if operation.module else None
        self._values[operation.writes] = _Value(output, frozenset({place}))

    def also_writes(self, name: str, of: str, shape: Shape, fresh: bool) -> None:
        """Add another output of the operation that wrote `of`, with memory of its own if it is fresh."""
        if of in self._values:
            first = self._values[of]
            storage = _Storage(prod(shape), first.storage.dtype, is_kept=False) if fresh else first.storage
            self._values[name] = _Value(storage, first.makers)

    def merge(self, writes: str, into: str, parameters: Sequence[Parameter]) -> None:
        """Count an operation to the row that made a value, as the addition of a bias to a product."""
        value = self._values[writes] = self._values[into]
        for place in value.makers - {NETWORK_INPUT}:
            self._records[place] = _with_parameters(self._records[place], self._new(parameters))

    def pass_on(self, writes: str, reads: Sequence[str]) -> None:
        """Let a value stand for the first one that it is made of, where nothing else is known about it."""
        if source := next((self._values[name] for name in reads if name in self._values), None):
            self._values[writes] = source

    def _output(self, operation: Operation, reads: Sequence[_Value]) -> _Storage:
        if not operation.fresh and reads:
            return reads[0].storage
        return _Storage(prod(operation.shape), operation.dtype, is_kept=not reads and not operation.recorded)

    def _keep(self, operation: Operation, reads: Sequence[_Value], output: _Storage) -> tuple[int, int]:
        """Return the elements and the other bytes of a sample that this operation is the first to keep."""
        tensors = kept_by(operation.formula)
        storages = [value.storage for value in reads[: tensors.inputs]] + ([output] if tensors.output else [])
        floats = fixed_bytes = 0
        for storage in storages if operation.dtype in FLOATS else ():
            if not storage.is_kept:
                storage.is_kept = True
                size = storage.elements
                floats += size if storage.dtype in FLOATS else 0
                fixed_bytes += 0 if storage.dtype in FLOATS else size * bytes_of(storage.dtype)
        rows = prod(operation.shape[:-1]) if operation.shape else 0
        floats += tensors.floats_per_row * rows
        fixed_bytes += tensors.bytes_per_output * prod(operation.shape)
        return floats // self.batch_size, fixed_bytes // self.batch_size

    def _record(
        self, operation: Operation, output: _Storage, makers: frozenset[int], floats: int, fixed_bytes: int
    ) -> int:
        new = self._new(operation.parameters)
        record = LayerRecord(
            operation.name,
            operation.kind,
            operation.shape[1:],
            output.elements // self.batch_size if operation.fresh else 0,
            0,
            functional=not operation.module and not operation.parameters,
            inputs=tuple(sorted(makers)),
            trainable=0,
            parameter_bytes=0,
            dtype=operation.dtype,
            saved=floats,
            saved_fixed_bytes=fixed_bytes,
            **operation.window,
        )
        self._records.append(_with_parameters(record, new))
        return len(self._records) - 1

    def _extend(
        self, operation: Operation, output: _Storage, makers: frozenset[int], floats: int, fixed_bytes: int
    ) -> int:
        """Add an operation to the row of its layer: only the layer's output counts as its activations."""
        place = len(self._records) - 1
        row = _with_parameters(self._records[place], self._new(operation.parameters))
        fresh = output.elements // self.batch_size if operation.fresh or row.activations else 0
        inputs = tuple(sorted({*(row.inputs or ()), *makers} - {place}))
        self._records[place] = replace(
            row, output_shape=operation.shape[1:], dtype=operation.dtype, activations=fresh, inputs=inputs
        )
        self._add_saved(floats, fixed_bytes)
        return place

    def _add_saved(self, floats: int, fixed_bytes: int) -> None:
        if self._records and (floats or fixed_bytes):
            row = self._records[-1]
            self._records[-1] = replace(
                row, saved=(row.saved or 0) + floats, saved_fixed_bytes=(row.saved_fixed_bytes or 0) + fixed_bytes
            )

    def _new(self, parameters: Iterable[Parameter]) -> list[Parameter]:
        """Return the parameters that no earlier row counts."""
        new = [item for item in parameters if item.name not in self._counted]
        self._counted |= {item.name: item for item in new}
        return new

    def finish(self, parameters: Iterable[Parameter], kinds: Mapping[str, str] | None = None) -> LayerTable:
        """Return the table; parameters that no operation owns are rows at its end, one for each module.

        `kinds` are the classes of modules by their names.
        """
        everything = list(parameters)
        if not self._records:
            raise UserError("expected a network with operations, found none: name another file")
        for owner, own in _by_owner(self._new(everything)).items():
            row = LayerRecord(
                owner, (kinds or {}).get(owner, "Parameter"), (), 0, 0, inputs=(), trainable=0, parameter_bytes=0,
                saved=0, saved_fixed_bytes=0,
            )  # fmt: skip
            self._records.append(_with_parameters(row, own))
        trainable = tuple(item.shape for item in self._counted.values() if item.trainable)
        return LayerTable(tuple(self._records), trainable, self._input_elements)


def _makers_of(values: Iterable[_Value]) -> frozenset[int]:
    return frozenset().union(*(value.makers for value in values))


def _by_owner(parameters: Iterable[Parameter]) -> dict[str, list[Parameter]]:
    owners: dict[str, list[Parameter]] = {}
    for item in parameters:
        owners.setdefault(item.name.rpartition(".")[0], []).append(item)
    return owners


def _with_parameters(row: LayerRecord, parameters: Sequence[Parameter]) -> LayerRecord:
    if not parameters:
        return row
    return replace(
        row,
        parameters=row.parameters + sum(item.elements for item in parameters),
        trainable=(row.trainable or 0) + sum(item.elements for item in parameters if item.trainable),
        parameter_bytes=(row.parameter_bytes or 0) + sum(item.elements * bytes_of(item.dtype) for item in parameters),
    )


def batch_of(shape: Sequence[int], name: str) -> int:
    """Return the batch of an input, which is its first size."""
    if not shape or not shape[0]:
        raise UserError(f"expected the batch as the first size of the input {shown(name)}, found {list(shape)}: fix it")
    return shape[0]
