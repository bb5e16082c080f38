"""Forms of activation checkpointing: which blocks are recomputed, what is saved of them, and where."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from vramcast.errors import UserError

CHECKPOINTING_WORDS = ("none", "full", "reentrant", "every=N", "every_n_layers=N", "ops", "offload")
_COUNTS = {"every", "every_n_layers"}
_COUNT = re.compile("[0-9]{1,6}")
_Block = TypeVar("_Block")


@dataclass(frozen=True)
class CheckpointingForm:
    """A form of checkpointing; by default each block is recomputed, without re-entering autograd."""

    every: int = 1
    """The distance of recomputed blocks: 2 for the second of each two, as torchtitan's selective_ac_option."""
    every_n_layers: int = 1
    """The same from the first block on: 2 for the first of each two, as every_n_layers of transformers."""
    reentrant: bool = False
    """Use torch's reentrant implementation."""
    ops: bool = False
    """Save the outputs of attention and of every second matrix product, as torchtitan's selective_ac_option 'op'."""
    offload: bool = False
    """Hold the inputs of blocks on the host until they are recomputed."""

    def text(self) -> bool | str:
        """Return one value for equal forms: True for the default form, else words in a fixed order."""
        words = [
            "reentrant" if self.reentrant else "",
            f"every={self.every}" if self.every > 1 else "",
            f"every_n_layers={self.every_n_layers}" if self.every_n_layers > 1 else "",
            "ops" if self.ops else "",
            "offload" if self.offload else "",
        ]
        return ",".join(filter(None, words)) or True

    def chosen(self, blocks: Sequence[_Block]) -> list[_Block]:
        """Return the blocks that are recomputed: torchtitan counts them from one, transformers from zero."""
        return list(blocks[self.every - 1 :: self.every] if self.every > 1 else blocks[:: self.every_n_layers])


@lru_cache(maxsize=256)  # bounded, because clients of a service choose the texts
def _parsed(text: str) -> CheckpointingForm | None:
    if text.strip().lower() == "none":
        return None
    values: dict[str, Any] = {}
    for word in (item.strip().lower() for item in text.split(",")):
        name, _, number = word.partition("=")
        if name in _COUNTS and _COUNT.fullmatch(number) and 1 <= int(number) <= 2**16:
            values[name] = int(number)
        elif word in ("reentrant", "ops", "offload"):
            values[word] = True
        elif word != "full":
            raise UserError(
                f"expected checkpointing such as 'every=2,offload', with {', '.join(CHECKPOINTING_WORDS)}, found "
                f"{text!r}: write it like that"
            )
    if "ops" in values and len(values) > 1:
        raise UserError(f"expected ops as the only word of checkpointing, found {text!r}: leave out the others")
    if values.keys() >= _COUNTS:
        raise UserError(f"expected every or every_n_layers in checkpointing, found {text!r}: leave one out")
    return CheckpointingForm(**values)


def checkpointing_form(value: Any) -> CheckpointingForm | None:
    """Return the form that an option means: a truth value, or words separated by commas; None for no checkpointing."""
    if isinstance(value, str):
        return _parsed(value)
    if not isinstance(value, bool):
        raise UserError(f"expected training.checkpointing to be true, false or a form, found {value!r}: change it")
    return CheckpointingForm() if value else None


def canonical_checkpointing(value: Any) -> bool | str:
    """Return one value for equal forms: 'full' and 'every=1' are True."""
    form = checkpointing_form(value)
    return False if form is None else form.text()
