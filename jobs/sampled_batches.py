"""Inputs of varying shape: several batches are drawn under fixed seeds, and the largest is kept."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_FIRST_DRAWS = 4
"""Batches of one shape in so many draws are taken to have no other."""
_DRAWS = 16


@dataclass(frozen=True)
class SampledBatch:
    """The largest of some batches."""

    batch: Any
    seed: int
    note: str | None = None
    """A sentence about the sampled batches, if shapes vary."""


def largest_batch(draw: Callable[[int], Any]) -> SampledBatch:
    """Draw several batches, each under its own seed, and return the one with the most bytes.

    The seeds are the same in every call, so that a repeat gives the same batch.
    """
    batches = [draw(0)]
    for seed in range(1, _DRAWS):
        if seed == _FIRST_DRAWS and len(set(map(_shapes, batches))) == 1:
            break
        try:
            batches.append(draw(seed))
        except Exception:
            break
    sizes = [_size_bytes(batch) for batch in batches]
    seed = sizes.index(max(sizes))
    if len(set(map(_shapes, batches))) == 1:
        return SampledBatch(batches[0], 0)
    smallest = batches[sizes.index(min(sizes))]
    note = (
        f"the shapes of inputs vary: of {len(batches)} batches, drawn with seeds from 0, the largest was traced "
        f"({_text(batches[seed])}; the smallest was {_text(smallest)})"
    )
    return SampledBatch(batches[seed], seed, note)


def seeded(make: Callable[[], Any], seed: int) -> Any:
    """Call a function under a seed of random, torch and numpy."""
    with _random_state_kept():
        random.seed(seed)
        torch.manual_seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed)
        return make()


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Restore the generators of random, torch and numpy, which a caller in this process may have seeded."""
    python, numpy = random.getstate(), sys.modules.get("numpy")
    legacy = numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy:
                numpy.random.set_state(legacy)


def _tensors(batch: Any) -> list[Tensor]:
    return [item for item in tree_leaves(batch) if isinstance(item, Tensor)]


def _shapes(batch: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(item.shape) for item in _tensors(batch))


def _size_bytes(batch: Any) -> int:
    return sum(item.numel() * item.element_size() for item in _tensors(batch))


def _text(batch: Any) -> str:
    return ", ".join("x".join(map(str, shape)) for shape in _shapes(batch)) or "no tensors"
