"""The layers of a table as columns: what features and strata read of them is computed once for each table."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from vramcast.jobs.spec import LayerRecord

_KIND, _SHAPE, _ACTIVATIONS, _PARAMETERS = map(attrgetter, ("kind", "output_shape", "activations", "parameters"))
_HASH_DIGITS = 32
KINDS_REMEMBERED = 4096
"""Requests may name any kinds, so that memory for them is bounded."""


@lru_cache(maxsize=KINDS_REMEMBERED)
def is_convolution(kind: str) -> bool:
    """Return whether a layer is a convolution of torch or of a library; Conv1D of transformers is none."""
    return "conv" in kind.lower() and kind != "Conv1D"


@dataclass(frozen=True)
class ConvolutionColumns:
    """The convolutions of a table that have a shape: [convolutions] in every array, in elements of one sample."""

    places: list[int]
    """In the table."""
    moved: NDArray[np.float64]
    """Input and output."""
    weight: NDArray[np.float64]
    channels: NDArray[np.int64]
    size: NDArray[np.int64]
    """Of the last dimension."""

    def totals(self, batch_size: int) -> NDArray[np.float64]:
        """Return the elements that each reads and writes for a batch."""
        return batch_size * self.moved + self.weight


class LayerColumns(tuple[LayerRecord, ...]):
    """The layers of one table, with columns that are computed when they are first read."""

    @classmethod
    def of(cls, layers: Iterable[LayerRecord]) -> "LayerColumns":
        """Return layers with columns; those that have them stay as they are."""
        return layers if isinstance(layers, cls) else cls(layers)

    @cached_property
    def kinds(self) -> list[str]:
        """The kind of each layer."""
        return list(map(_KIND, self))

    @cached_property
    def counts(self) -> Counter[str]:
        """The number of layers of each kind, in the order of their first occurrence."""
        return Counter(self.kinds)

    @cached_property
    def activations(self) -> list[int]:
        """The elements of new storage of each layer, for one sample."""
        return list(map(_ACTIVATIONS, self))

    @cached_property
    def parameters(self) -> list[int]:
        """The parameters of each layer."""
        return list(map(_PARAMETERS, self))

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each output, without the batch."""
        return list(map(_SHAPE, self))

    @cached_property
    def largest_outputs(self) -> list[int]:
        """The activations of all layers, the largest first."""
        return sorted(self.activations, reverse=True)

    @cached_property
    def widest(self) -> int:
        """The largest first size of an output."""
        return max((shape[0] for shape in set(self.shapes) if shape), default=0)

    @cached_property
    def convolution_count(self) -> int:
        """The number of convolutions."""
        return sum(number for kind, number in self.counts.items() if is_convolution(kind))

    @cached_property
    def batch_norms(self) -> bool:
        """True if a layer normalises over the batch."""
        return any("batchnorm" in kind.lower() for kind in self.counts)

    @cached_property
    def content(self) -> str:
        """A hash over kinds and sizes: networks that differ in names or views alone count as one."""
        digest = hashlib.sha256("\0".join(self.kinds).encode("utf-8", "surrogatepass"))
        digest.update(np.array([self.activations, self.parameters], dtype=np.float64).tobytes())
        return digest.hexdigest()[:_HASH_DIGITS]

    def convolutions(self, input_elements: int) -> ConvolutionColumns:
        """Return the convolutions, for an input of that size.

        The input of a layer is assumed to be the previous output, which is wrong after a branch: a table has no edges.
        """
        if input_elements not in self._convolutions:
            self._convolutions[input_elements] = self._made_convolutions(input_elements)
        return self._convolutions[input_elements]

    @cached_property
    def _convolutions(self) -> dict[int, ConvolutionColumns]:
        return {}

    def _made_convolutions(self, input_elements: int) -> ConvolutionColumns:
        convolutions, shapes = {kind for kind in self.counts if is_convolution(kind)}, self.shapes
        places = [place for place, kind in enumerate(self.kinds) if kind in convolutions and shapes[place]]
        outputs = [math.prod(shapes[place]) for place in places]
        inputs = [math.prod(shapes[place - 1]) if place else input_elements for place in places]
        return ConvolutionColumns(
            places,
            np.array(inputs, dtype=np.float64) + np.array(outputs, dtype=np.float64),
            np.array([self.parameters[place] for place in places], dtype=np.float64),
            np.array([shapes[place][0] for place in places], dtype=np.int64),
            np.array([shapes[place][-1] for place in places], dtype=np.int64),
        )
