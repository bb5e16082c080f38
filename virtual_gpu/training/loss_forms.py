"""Forms of the loss of language models, and the kernels of Liger: how they are written as options."""

import re
from collections.abc import Mapping
from typing import Any

from vramcast.errors import UserError

LOSS_FORMS = ("default", "upcast", "chunked", "fused")
"""'default' is the network's own; 'upcast' casts all logits to fp32 first; 'chunked' computes the logits in chunks of
the sequence and casts one chunk at a time; 'fused' is Liger's fused linear cross entropy."""
CHUNKS = 8
"""The default of torchtune's CEWithChunkedOutputLoss."""
FUSED_LOSS = "fused_linear_cross_entropy"
"""Liger's name of the fused form."""
DEFAULT_KERNELS = "default"
"""Stands for the kernels that Liger applies by itself, which other words then add to, or leave out as in 'no_rope'."""
KERNELS = (
    "rope", "rms_norm", "layer_norm", "swiglu", "geglu", "relu_squared", "cross_entropy", FUSED_LOSS
)  # fmt: skip
"""Kernels that functions of Liger-Kernel 0.8 take (monkey_patch.py); each function takes some of them."""
_WITHOUT = "no_"
_CHUNKED = re.compile(r"chunked(?:=([1-9][0-9]{0,4}))?", re.ASCII)


def canonical_loss_form(text: Any) -> str:
    """Return one text for equal forms: 'chunked' is 'chunked=8'."""
    word = text.strip().lower() if isinstance(text, str) else ""
    chunked = _CHUNKED.fullmatch(word)
    if chunked:
        return f"chunked={int(chunked[1] or CHUNKS)}"
    if word not in LOSS_FORMS:
        raise UserError(
            f"expected the loss form {', '.join(LOSS_FORMS)} or chunked=N, found {text!r}: choose one of these"
        )
    return word


def chunks_of(form: str) -> int | None:
    """Return the number of chunks of a canonical form, None if it is not chunked."""
    return int(form.partition("=")[2]) if form.startswith("chunked=") else None


def canonical_kernels(value: Any) -> bool | str:
    """Return one value for equal choices of Liger's kernels: True for its default ones, else sorted names.

    'default,no_swiglu' and 'no_swiglu' are the default kernels but one; 'rope' is this kernel alone.
    """
    if isinstance(value, bool) or value == "none":
        return value is True
    names = {item.strip().lower() for item in value.split(",")} if isinstance(value, str) else {""}
    if not all(name.isascii() and name.isidentifier() for name in names):
        raise UserError(
            f"expected liger to be true, false or names of its kernels such as 'rope,rms_norm' or 'no_rope', found "
            f"{value!r}: write it like that"
        )
    if both := sorted(name for name in names if f"{_WITHOUT}{name}" in names):
        raise UserError(f"expected each of Liger's kernels once, found {both[0]} and no_{both[0]}: leave one out")
    if any(name.startswith(_WITHOUT) for name in names):
        names.add(DEFAULT_KERNELS)
    return True if names == {DEFAULT_KERNELS} else ",".join(sorted(names))


def chosen_kernels(kernels: str) -> tuple[bool, dict[str, bool]]:
    """Return whether a canonical choice changes the default kernels, and whether each named kernel is on."""
    names = kernels.split(",")
    switches = {name.removeprefix(_WITHOUT): not name.startswith(_WITHOUT) for name in names if name != DEFAULT_KERNELS}
    return DEFAULT_KERNELS in names, switches


def changed_kernels(switches: Mapping[str, bool]) -> bool | str:
    """Return the choice that changes Liger's default kernels by these switches."""
    words = [name if is_on else f"{_WITHOUT}{name}" for name, is_on in switches.items()]
    return canonical_kernels(",".join([DEFAULT_KERNELS, *words]))


def with_fused_loss(kernels: bool | str) -> bool | str:
    """Return a choice of Liger's kernels with its fused loss among them; the default ones contain it."""
    return kernels if kernels is True else canonical_kernels(f"{kernels},{FUSED_LOSS}" if kernels else FUSED_LOSS)
