"""A network as a sequence: one token for each layer with parameters, with what follows it folded in.

Activations, dropouts and additions repeat the shape of the layer before them. As tokens of their own they would
make the sequence three times as long, and attention nine times as dear.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from dataset_builder.schema import LayerRecord
from models.example import Example
from models.features.layers import Convolution, convolutions_of, log_amount

TOKEN_NUMBERS = ("output", "followers", "parameters", "width", "size", "convolution", "follower_count", "misaligned")


@dataclass(frozen=True)
class Token:
    """A layer, as the Transformer reads it."""

    kind: str
    numbers: tuple[float, ...]
    """In the order of TOKEN_NUMBERS."""


def tokens_of(example: Example) -> list[Token]:
    """The tokens of an example's layers, in execution order."""
    return [_token(owner, convolution, followers, example) for owner, convolution, followers in _folded(example)]


Folded = tuple[LayerRecord, Convolution, list[LayerRecord]]


def _folded(example: Example) -> Iterator[Folded]:
    current: Folded | None = None
    for layer, convolution in zip(example.layers, convolutions_of(example), strict=True):
        if current is not None and not layer.parameters:
            current[2].append(layer)
            continue
        if current is not None:
            yield current
        current = (layer, convolution, [])
    if current is not None:
        yield current


def _token(owner: LayerRecord, convolution: Convolution, followers: list[LayerRecord], example: Example) -> Token:
    batch = example.training.batch_size
    numbers = (
        log_amount(batch * owner.activations),
        log_amount(batch * sum(layer.activations for layer in followers)),
        log_amount(owner.parameters),
        log_amount(owner.output_shape[0] if owner.output_shape else 0),
        log_amount(math.prod(owner.output_shape[1:])),
        log_amount(convolution.total),
        log_amount(len(followers)),
        float(bool(owner.output_shape) and owner.output_shape[0] % 4 != 0),
    )
    return Token(owner.kind, numbers)
