"""Rows that say little about other stacks, found by evidence other than the size of an error.

Another process held memory, or the lengths of the batches are not known. Both are properties of the stack that was
measured. Such rows stay in the strata of that stack, and do not widen the bounds of jobs on other devices.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vramcast.models.distribution import own_bytes_of
from vramcast.models.example import Example
from vramcast.virtual_gpu.allocator.sizes import MIB

_LEAST_MIB = 256
"""The least memory of another process: an idle context takes more."""
_RECURRENCES = 3
"""Networks with the same excess, to the MiB, that make it a constant of the stack."""


def disturbed(examples: Sequence[Example], own_bytes: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return [n]: true for rows with unknown lengths, or with a constant that recurs.

    A constant recurs if several networks exceed their estimates by the same number of MiB. Networks differ in every
    size, so an error of the estimate does not repeat to the MiB; the memory of another process does.
    """
    excess = np.round((own_bytes_of(examples, own_bytes) - own_bytes) / MIB).astype(np.int64)
    keys = [(example.source, int(value)) for example, value in zip(examples, excess, strict=True)]
    networks = {(key, example.group) for key, example in zip(keys, examples, strict=True)}
    counts = Counter(key for key, _ in networks)
    recurs = [value >= _LEAST_MIB and counts[key] >= _RECURRENCES for key, value in zip(keys, excess, strict=True)]
    marked = [example.measured.varying for example in examples]
    return np.array(recurs, dtype=np.bool_) | np.array(marked, dtype=np.bool_)
