"""Forms of the loss of language models, and the kernels of Liger: how they are written as options."""

import re
from functools import lru_cache
from typing import Any

from vramcast.errors import UserError

LOSS_FORMS = ("default", "upcast", "chunked", "fused")
"""'default' is the network's own; 'upcast' casts all logits to fp32 first; 'chunked' computes the logits in chunks of
the sequence and casts one chunk at a time; 'fused' is Liger's fused linear cross entropy."""
CHUNKS = 8
"""The default of torchtune's CEWithChunkedOutputLoss."""
FUSED_LOSS = "fused_linear_cross_entropy"
"""Liger's name of the fused form."""
_CHUNKED = re.compile(r"chunked(?:=([1-9][0-9]{0,4}))?", re.ASCII)


@lru_cache(maxsize=256)  # bounded, because clients of a service choose the texts
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
    """Return one value for equal choices of Liger's kernels: True for its default ones, else sorted names."""
    if isinstance(value, bool) or value == "none":
        return value is True
    names = [item.strip().lower() for item in value.split(",")] if isinstance(value, str) else [""]
    if not all(name.isascii() and name.isidentifier() for name in names):
        raise UserError(
            f"expected liger to be true, false or names of its kernels such as 'rope,rms_norm', found {value!r}: "
            "write it like that"
        )
    return ",".join(sorted(set(names)))


def with_fused_loss(kernels: bool | str) -> bool | str:
    """Return a choice of Liger's kernels with its fused loss among them; the default ones contain it."""
    return kernels if kernels is True else canonical_kernels(f"{kernels},{FUSED_LOSS}" if kernels else FUSED_LOSS)
