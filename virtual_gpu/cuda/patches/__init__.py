"""Patches of torch that let device tensors without data pass for CUDA tensors: one module for each part of torch.

Each module has a function `apply(patches, gpu)`. All of them were checked on torch 2.13; `Patches.undo` restores torch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


class Patches:
    """Attributes that are replaced until `undo`."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []
        self._lifted = False

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute; one that the owner inherits is deleted again later."""
        self._before.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def set_where_present(self, owner: Any, values: dict[str, Any]) -> None:
        """Replace those attributes that this release of torch has."""
        for name, value in values.items():
            if hasattr(owner, name):
                self.set(owner, name, value)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Let torch be as it was for a while: its compiler reads its own functions. May be nested."""
        if self._lifted:
            yield
            return
        self._lifted = True
        applied = [(owner, name, before, vars(owner)[name]) for owner, name, before in self._before]
        for owner, name, before, _ in reversed(applied):
            _restore(owner, name, before)
        try:
            yield
        finally:
            self._lifted = False
            for owner, name, _, value in applied:
                setattr(owner, name, value)

    def replaces(self, value: Any) -> bool:
        """Return whether a value of torch is replaced by another."""
        return any(before is value for _, _, before in self._before)

    def undo(self) -> None:
        """Restore all attributes, the last one first."""
        while self._before:
            _restore(*self._before.pop())


def _restore(owner: Any, name: str, value: Any) -> None:
    if value is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)
