"""Positional inputs for networks that take theirs by name."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn


class KeywordInputs(nn.Module):
    """Passes positional inputs to a module by keyword; 'a.b' is the entry b of the mapping a."""

    def __init__(self, subject: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.subject = subject
        self.names = names

    def forward(self, *inputs: Tensor) -> Any:
        """Call the module with named inputs."""
        named: dict[str, Any] = {}
        for name, value in zip(self.names, inputs, strict=True):
            outer, _, inner = name.partition(".")
            if inner:
                named.setdefault(outer, {})[inner] = value
            else:
                named[outer] = value
        return self.subject(**named)
