"""A network as a sequence of tokens, one for each distinct layer with parameters.

Activations, dropouts and additions repeat the shape of the previous layer and are folded into its token. Equal layers
share one token with their count: a Transformer of 40 blocks with 500 layers has 8 tokens.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from vramcast.jobs.spec import LayerRecord
from vramcast.models.example import Example
from vramcast.models.features.layers import Convolution, convolutions_of, log_amount

TOKEN_NUMBERS = (
    "output",
    "followers",
    "parameters",
    "width",
    "size",
    "convolution",
    "follower_count",
    "misaligned",
    "times",
)


@dataclass(frozen=True)
class Token:
    """A layer as the Transformer reads it."""

    kind: str
    numbers: tuple[float, ...]
    """In the order of TOKEN_NUMBERS."""


def tokens_of(example: Example) -> list[Token]:
    """Return the tokens of an example's layers in the order of their first occurrence."""
    times = Counter(
        _token(owner, convolution, followers, example) for owner, convolution, followers in _folded(example)
    )
    return [Token(token.kind, (*token.numbers, log_amount(count))) for token, count in times.items()]


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
