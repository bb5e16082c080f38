"""Reads pickles of containers and scalars without running anything.

A pickle is a program for a stack machine, and `pickle.load` runs what it names. This machine knows the opcodes that
build containers and scalars alone, so nothing is imported or called. It uses memory in proportion to the file, which
`pickle.Unpickler` with a restricted `find_class` does not promise: a few bytes may ask it for gigabytes.
"""

import struct
from collections.abc import Callable
from typing import Any

from vramcast.errors import UserError

MOST_CONTAINERS = 30_000_000
_MOST_MARKS = 1_000
"""Containers that may be open at once: torch writes fewer than ten."""
_MOST_MEMO_GAP = 1_000_000
"""Between a memo index and the number of entries before it: indices are counted up."""
_KEYS = frozenset({str, int, float, bool, bytes, type(None)})
_CALLS = frozenset(b"cRioObP\x81\x82\x83\x84\x92\x93Q")
"""GLOBAL, REDUCE, BUILD and others that import or call, and persistent ids."""


class PickleError(UserError):
    """A pickle that cannot be read."""


def load_containers(data: bytes, name: str) -> Any:
    """Return the lists, tuples, dicts and scalars of a pickle; raise PickleError for anything else."""
    return _Machine(data, name).run()


class _Machine:
    """The stack machine of one pickle."""

    def __init__(self, data: bytes, name: str) -> None:
        self._data = data
        self._name = name
        self._at = 0
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []
        """The stacks below each open mark."""
        self._memo: dict[int, Any] = {}
        self._containers = 0

    def run(self) -> Any:
        """Run the program and return its value."""
        data, table = self._data, _OPERATIONS
        try:
            while True:
                code = data[self._at]
                self._at += 1
                if code == _STOP:
                    return self._stack.pop()
                operation = table[code]
                if operation is None:
                    raise self._unknown(code)
                operation(self)
        except (IndexError, KeyError, struct.error, UnicodeDecodeError, TypeError, OverflowError, AttributeError):
            raise PickleError(
                f"expected a whole pickle of a memory snapshot in {self._name}, found one cut or damaged at byte "
                f"{self._at:,}: record or copy it again"
            ) from None

    def _unknown(self, code: int) -> PickleError:
        kind = "one that names code, which is never run" if code in _CALLS else f"the opcode {code:#04x}"
        return PickleError(
            f"expected a pickle of containers and scalars in {self._name}, found {kind}: record it with "
            "torch.cuda.memory._dump_snapshot"
        )

    def take(self, count: int) -> bytes:
        """Return the next bytes of the program."""
        start = self._at
        self._at = start + count
        if self._at > len(self._data):
            raise IndexError("the pickle ends early")
        return self._data[start : self._at]

    def number(self, layout: str, count: int) -> Any:
        """Return a number out of the next bytes."""
        return struct.unpack(layout, self.take(count))[0]

    def sized(self, layout: str, count: int) -> bytes:
        """Return bytes whose number stands before them."""
        return self.take(self.number(layout, count))

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self._stack.append(value)

    def make(self, value: Any) -> None:
        """Put a new container on the stack."""
        self._containers += 1
        if self._containers > MOST_CONTAINERS:
            raise PickleError(
                f"expected at most {MOST_CONTAINERS:,} containers in {self._name}, found more: record fewer events "
                "(max_entries)"
            )
        self._stack.append(value)

    def mark(self) -> None:
        """Open a container whose items follow."""
        if len(self._outer) >= _MOST_MARKS:
            raise PickleError(f"expected at most {_MOST_MARKS} nested containers in {self._name}, found more: check it")
        self._outer.append(self._stack)
        self._stack = []

    def items(self) -> list[Any]:
        """Return the items since the last mark."""
        items, self._stack = self._stack, self._outer.pop()
        return items

    def top(self, count: int) -> tuple[Any, ...]:
        """Remove and return the last values."""
        if len(self._stack) < count:
            raise IndexError("the stack is empty")
        items = tuple(self._stack[-count:])
        del self._stack[-count:]
        return items

    def append(self, items: list[Any]) -> None:
        """Add items to the list on top of the stack."""
        if not isinstance(self._stack[-1], list):
            raise TypeError("items need a list")
        self._stack[-1].extend(items)

    def set_items(self, items: list[Any]) -> None:
        """Add keys and values to the dict on top of the stack."""
        if not isinstance(self._stack[-1], dict) or len(items) % 2:
            raise TypeError("keys and values need a dict")
        if not _KEYS.issuperset(map(type, items[::2])):  # the hash of nested tuples recurses without a limit
            raise TypeError("keys are scalars")
        self._stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def memoize(self, index: int | None = None) -> None:
        """Remember the value on top of the stack."""
        place = len(self._memo) if index is None else index
        if place > len(self._memo) + _MOST_MEMO_GAP:
            raise IndexError("the memo has a gap")
        self._memo[place] = self._stack[-1]

    def recall(self, index: int) -> None:
        """Put a remembered value on the stack."""
        self._stack.append(self._memo[index])


def _long(machine: _Machine, layout: str, count: int) -> None:
    size = machine.number(layout, count)
    if not 0 <= size <= 32:
        raise OverflowError("no size or address is that long")
    machine.push(int.from_bytes(machine.take(size), "little", signed=True))


def _text(machine: _Machine, layout: str, count: int, encoding: str = "utf-8") -> None:
    errors = "surrogatepass" if encoding == "utf-8" else "strict"
    machine.push(machine.sized(layout, count).decode(encoding, errors))


def _dict(machine: _Machine, items: list[Any]) -> None:
    machine.make({})
    machine.set_items(items)


_STOP = ord(".")
_NAMED: dict[bytes, Callable[[_Machine], Any]] = {
    b"\x80": lambda m: m.take(1),  # PROTO
    b"\x95": lambda m: m.take(8),  # FRAME
    b"}": lambda m: m.make({}),
    b"]": lambda m: m.make([]),
    b")": lambda m: m.push(()),
    b"(": lambda m: m.mark(),
    b"s": lambda m: m.set_items(list(m.top(2))),
    b"u": lambda m: m.set_items(m.items()),
    b"a": lambda m: m.append(list(m.top(1))),
    b"e": lambda m: m.append(m.items()),
    b"\x85": lambda m: m.make(m.top(1)),
    b"\x86": lambda m: m.make(m.top(2)),
    b"\x87": lambda m: m.make(m.top(3)),
    b"t": lambda m: m.make(tuple(m.items())),
    b"l": lambda m: m.make(m.items()),
    b"d": lambda m: _dict(m, m.items()),
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"J": lambda m: m.push(m.number("<i", 4)),
    b"K": lambda m: m.push(m.number("<B", 1)),
    b"M": lambda m: m.push(m.number("<H", 2)),
    b"G": lambda m: m.push(m.number(">d", 8)),
    b"\x8a": lambda m: _long(m, "<B", 1),
    b"\x8b": lambda m: _long(m, "<i", 4),
    b"\x8c": lambda m: _text(m, "<B", 1),
    b"X": lambda m: _text(m, "<I", 4),
    b"\x8d": lambda m: _text(m, "<Q", 8),
    b"U": lambda m: _text(m, "<B", 1, "latin-1"),
    b"T": lambda m: _text(m, "<I", 4, "latin-1"),
    b"C": lambda m: m.push(m.sized("<B", 1)),
    b"B": lambda m: m.push(m.sized("<I", 4)),
    b"\x94": lambda m: m.memoize(),
    b"q": lambda m: m.memoize(m.number("<B", 1)),
    b"r": lambda m: m.memoize(m.number("<I", 4)),
    b"h": lambda m: m.recall(m.number("<B", 1)),
    b"j": lambda m: m.recall(m.number("<I", 4)),
    b"0": lambda m: m.top(1),
}
_OPERATIONS: list[Callable[[_Machine], Any] | None] = [_NAMED.get(bytes([code])) for code in range(256)]
