"""Encode features as tensors in units of the training set, on which the encoder is fitted."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vramcast.errors import UserError
from vramcast.models.estimators.batch import Inputs
from vramcast.models.example import Example
from vramcast.models.features import TOKEN_NUMBERS, Token, feature_set, tokens_of

Matrix = NDArray[np.float64]

_LEAST_DEVIATION = 1e-6
"""A feature that varies less counts as constant in the training set."""
_UNSEEN = 100.0
"""Distance in standard deviations of a value that differs from a constant of the training set."""
_CLIP = 5.0
"""Inputs of networks are clipped here, because they would extrapolate beyond."""


@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation of each column; 0 for the deviation of a constant."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    @classmethod
    def fit(cls, columns: Matrix) -> Self:
        """Learn the scale of the columns of a matrix."""
        deviation = columns.std(axis=0)
        return cls(
            tuple(columns.mean(axis=0).tolist()), tuple(np.where(deviation < _LEAST_DEVIATION, 0, deviation).tolist())
        )

    def apply(self, columns: Matrix) -> Matrix:
        """Return standard deviations; a value that differs from a constant is far off."""
        deviation, difference = np.asarray(self.deviation), columns - np.asarray(self.mean)
        unseen = np.where(np.abs(difference) < _LEAST_DEVIATION, 0, np.sign(difference) * _UNSEEN)
        return np.where(deviation > 0, difference / np.where(deviation > 0, deviation, 1), unseen)

    @property
    def varies(self) -> NDArray[np.bool_]:
        """Marks the columns that are not constant."""
        return np.asarray(self.deviation) > 0


@dataclass(frozen=True)
class ExampleEncoder:
    """Scales and vocabularies of one feature set. Plain data, so that it is shipped as JSON."""

    features: str
    names: tuple[str, ...]
    scale: Scale
    sources: tuple[str, ...]
    """Of the training set. An unknown source is encoded as their average."""
    kinds: tuple[str, ...]
    """Of layers; index 0 is for padding and for unknown kinds."""
    token_scale: Scale

    @classmethod
    def fit(cls, examples: Sequence[Example], features: str) -> Self:
        """Learn scales and vocabularies."""
        numbers = feature_set(features).numbers
        rows = [numbers(example) for example in examples]
        names, sources = tuple(rows[0]), tuple(sorted({example.source for example in examples}))
        matrix = np.array([[row[name] for name in names] for row in rows], dtype=np.float64)
        one_hot = np.array([[example.source == source for source in sources] for example in examples], dtype=np.float64)
        tokens = [token for example in examples for token in tokens_of(example)]
        kinds = tuple(sorted({token.kind for token in tokens}))
        return cls(
            features,
            names,
            Scale.fit(np.hstack([matrix, one_hot])),
            sources,
            kinds,
            Scale.fit(np.array([token.numbers for token in tokens], dtype=np.float64).reshape(-1, len(TOKEN_NUMBERS))),
        )

    @property
    def width(self) -> int:
        """Length of the vector."""
        return len(self.names) + len(self.sources)

    def matrix(self, examples: Sequence[Example]) -> Matrix:
        """Return [n, width]: features in standard deviations, not clipped, so that outliers show."""
        numbers = feature_set(self.features).numbers
        chosen = itemgetter(*self.names)  # there are several
        rows = [[*chosen(numbers(example)), *self._source(example)] for example in examples]
        return self.scale.apply(np.array(rows, dtype=np.float64).reshape(-1, self.width))

    def inputs(self, examples: Sequence[Example], with_tokens: bool, matrix: Matrix | None = None) -> Inputs:
        """Return the inputs of a network: clipped, and zero for features that were constant in training.

        `matrix` is that of the examples, where it is known already.
        """
        numbers = self.matrix(examples) if matrix is None else matrix
        clipped = np.where(self.scale.varies, numbers.clip(-_CLIP, _CLIP), 0)
        vector = torch.from_numpy(clipped).float()
        return Inputs(vector, *_padded(list(map(self._sequence, examples))) if with_tokens else _empty(len(examples)))

    def _source(self, example: Example) -> list[float]:
        if example.source not in self.sources:
            return list(self.scale.mean[len(self.names) :])
        return [float(example.source == source) for source in self.sources]

    def _sequence(self, example: Example) -> "Sequenced":
        tokens = tokens_of(example) or [_NO_LAYER]
        index = {kind: position for position, kind in enumerate(self.kinds, 1)}
        numbers = np.array([token.numbers for token in tokens], dtype=np.float64)
        scaled = np.where(self.token_scale.varies, self.token_scale.apply(numbers).clip(-_CLIP, _CLIP), 0)
        return torch.tensor([index.get(token.kind, 0) for token in tokens]), torch.from_numpy(scaled).float()

    def to_json(self) -> dict[str, Any]:
        """Return a mapping that `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read a mapping that `to_json` wrote; raise a UserError for unknown features."""
        feature_set(values["features"])
        scale, token_scale = (
            Scale(tuple(values[key]["mean"]), tuple(values[key]["deviation"])) for key in ("scale", "token_scale")
        )
        names, sources, kinds = (tuple(values[key]) for key in ("names", "sources", "kinds"))
        encoder = cls(values["features"], names, scale, sources, kinds, token_scale)
        if len(encoder.scale.mean) != encoder.width or len(encoder.token_scale.mean) != len(TOKEN_NUMBERS):
            raise UserError("expected a scale for each feature of the encoder, found others: train the estimator again")
        return encoder


Sequenced = tuple[Tensor, Tensor]
"""Kinds [length] and numbers [length, token numbers] of one example."""

_NO_LAYER = Token("", (0.0,) * len(TOKEN_NUMBERS))
"""For a network without layers, because attention needs at least one token."""


def _empty(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return kinds, numbers and padding of sequences without tokens."""
    numbers = torch.zeros(count, 0, len(TOKEN_NUMBERS))
    return torch.zeros(count, 0, dtype=torch.long), numbers, torch.ones(count, 0, dtype=torch.bool)


def _padded(sequences: Sequence[Sequenced]) -> tuple[Tensor, Tensor, Tensor]:
    """Return kinds, numbers and padding, filled with zeros up to the longest."""
    length = max((len(kinds) for kinds, _ in sequences), default=1)
    kinds = torch.zeros(len(sequences), length, dtype=torch.long)
    tokens = torch.zeros(len(sequences), length, len(TOKEN_NUMBERS))
    padding = torch.ones(len(sequences), length, dtype=torch.bool)
    for row, (indices, numbers) in enumerate(sequences):
        kinds[row, : len(indices)], tokens[row, : len(indices)], padding[row, : len(indices)] = indices, numbers, False
    return kinds, tokens, padding
