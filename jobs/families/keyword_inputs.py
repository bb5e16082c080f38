"""Positional inputs for networks that take theirs by name."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn


class KeywordInputs(nn.Module):
    """Passes positional inputs to a module by keyword; 'a.b' is the entry b of the mapping a.

    A batch of one that is padded to its longest sample has no mask.
    """

    def __init__(self, subject: nn.Module, names: Sequence[str], *, pads_to_longest: bool = False) -> None:
        super().__init__()
        self.subject = subject
        self.names = names
        self.pads_to_longest = pads_to_longest

    def forward(self, *inputs: Tensor) -> Any:
        """Call the module with named inputs."""
        return self.subject(**self.named(inputs))

    def named(self, inputs: Sequence[Tensor]) -> dict[str, Any]:
        """Return the inputs by name."""
        named: dict[str, Any] = {}
        for name, value in zip(self.names, inputs, strict=True):
            outer, _, inner = name.partition(".")
            if inner:
                named.setdefault(outer, {})[inner] = value
            else:
                named[outer] = value
        if self.pads_to_longest and len(inputs[0]) == 1:
            named.pop("attention_mask", None)  # transformers drops a mask of ones (masking_utils)
        return named
