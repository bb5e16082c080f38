"""Sequences of varying length: the longest of each batch decides its memory, and so which batches fit."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from vramcast.error_words import message_of
from vramcast.errors import UserError
from vramcast.models.answer import FITS, Answer

_SEED = 0
_TRIES = 7
"""Lengths that are simulated beside the longest."""
_PERCENTILES = (50, 90, 99)
_LONGEST = 2**31
"""torch cannot index larger tensors."""


def read_lengths(path: str) -> list[int]:
    """Read the number of tokens of each sample: a whole number a line, or an array of numpy (.npy)."""
    try:
        if path.endswith(".npy"):
            values = _array(path)
        else:
            values = [int(line) for line in Path(path).read_text(encoding="utf-8").split()]
    except (OSError, ValueError, TypeError, SyntaxError, OverflowError, MemoryError) as error:  # of numpy's header
        raise UserError(
            f"expected the tokens of each sample in {path}, a whole number a line or a .npy, found: "
            f"{message_of(error)}; fix it"
        ) from error
    if not values or min(values) < 1 or max(values) > _LONGEST:
        first = next((item for item in values if not 1 <= item <= _LONGEST), "none")
        raise UserError(f"expected lengths from 1 to {_LONGEST} in {path}, found {first}: fix it")
    return values


def _array(path: str) -> list[int]:
    import numpy  # noqa: PLC0415

    array = numpy.lib.format.open_memmap(path, mode="r")  # mapped: no memory for more than the file has, and no pickle
    if array.dtype.kind not in "iuf":
        raise ValueError(f"an array of {array.dtype}")
    if not (numpy.isfinite(array) & (array == numpy.floor(array))).all():  # columns of pandas are floats
        raise ValueError("numbers that are not whole")
    return [int(item) for item in array.ravel()]


def batch_lengths(lengths: Sequence[int], batch_size: int, longest: int | None) -> tuple[int, ...]:
    """Return the length of each batch in ascending order: samples are shuffled, cut to `longest`, and padded."""
    samples = [min(item, longest) if longest else item for item in lengths]
    random.Random(_SEED).shuffle(samples)  # noqa: S311 - no secret
    return tuple(sorted(max(samples[at : at + batch_size]) for at in range(0, len(samples), batch_size)))


def with_lengths(answer: Answer, lengths: Sequence[int], answer_for: Callable[[int], Answer]) -> Answer:
    """Return the answer for the longest batch with the share of batches that fit safely.

    The longest length that fits is searched among those of the batches; memory grows with the length.
    """
    distinct = sorted(set(lengths))
    low, high = -1, len(distinct) - 1
    if answer.verdict == FITS:
        low = high
    for _ in range(_TRIES):
        if high - low < 2:
            break
        middle = (low + high) // 2
        if answer_for(distinct[middle]).verdict == FITS:
            low = middle
        else:
            high = middle
    fitting = distinct[low] if low >= 0 else 0
    return replace(
        answer,
        lengths={
            "batches": len(lengths),
            **{f"p{percent}": lengths[(len(lengths) - 1) * percent // 100] for percent in _PERCENTILES},
            "longest": lengths[-1],
            "longest_fitting": fitting,
            "fitting_share": sum(item <= fitting for item in lengths) / len(lengths),
        },
    )
