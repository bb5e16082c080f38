"""Patches of torch that let device tensors without data pass for CUDA tensors: one module for each part of torch.

Each module has a function `apply(patches, gpu)`. All of them were checked on torch 2.13; `Patches.undo` restores torch.
"""

from typing import Any

_ABSENT = object()


class Patches:
    """Attributes that are replaced until `undo`."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute; one that the owner inherits is deleted again later."""
        self._before.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def set_where_present(self, owner: Any, values: dict[str, Any]) -> None:
        """Replace those attributes that this release of torch has."""
        for name, value in values.items():
            if hasattr(owner, name):
                self.set(owner, name, value)

    def undo(self) -> None:
        """Restore all attributes, the last one first."""
        while self._before:
            owner, name, value = self._before.pop()
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
