"""A plan: the network of a spec as a tree of layers, before any tensor exists.

The filter reads a plan's shapes, `subject` builds it as a module, `emit` prints it as source: three views of one tree.
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
        """This node and all below it, outermost first."""
        yield self
        for child in self.children:
            yield from child.walk()


def layer(kind: str, **args: Any) -> Node:
    """A node without children."""
    return Node(kind, args)


def chain(*children: Node) -> Node:
    """Nodes that run one after the other."""
    return Node("Sequential", {}, children)


@dataclass(frozen=True)
class InputTensor:
    """What the network is fed: shape without the batch, and for tokens the size of their vocabulary."""

    shape: tuple[int, ...]
    vocabulary: int | None = None


@dataclass(frozen=True)
class Plan:
    """A network ready to be checked, built or printed."""

    inputs: tuple[InputTensor, ...]
    root: Node
