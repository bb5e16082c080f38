"""A plan: the network of a spec as a tree of layers, before any tensor exists.

The filter computes its shapes, `subject` builds it as a module, and `emit` prints it as source code.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Node:
    """A class of torch.nn, or of `families.blocks`, with its arguments and the modules inside it."""

    kind: str
    args: Mapping[str, Any] = field(default_factory=dict)
    children: tuple["Node", ...] = ()

    def walk(self) -> Iterator["Node"]:
        """Yield this node and all nodes below it, outermost first."""
        yield self
        for child in self.children:
            yield from child.walk()


def layer(kind: str, **args: Any) -> Node:
    """Return a node without children."""
    return Node(kind, args)


def chain(*children: Node) -> Node:
    """Return a node that runs its children one after the other."""
    return Node("Sequential", {}, children)


@dataclass(frozen=True)
class InputTensor:
    """An input of a network: its shape without the batch, and the vocabulary size if it is tokens."""

    shape: tuple[int, ...]
    vocabulary: int | None = None


@dataclass(frozen=True)
class Plan:
    """A network ready to be checked, built or printed."""

    inputs: tuple[InputTensor, ...]
    root: Node
