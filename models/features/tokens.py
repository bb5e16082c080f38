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
from vramcast.models.features.layers import log_amount

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
    times = Counter(_token(owner, total, followers, example) for owner, total, followers in _folded(example))
    return [Token(token.kind, (*token.numbers, log_amount(count))) for token, count in times.items()]


Folded = tuple[LayerRecord, float, list[LayerRecord]]
"""A layer with parameters, the elements that it moves if it is a convolution, and the layers that follow it."""


def _folded(example: Example) -> Iterator[Folded]:
    current: Folded | None = None
    convolutions = example.columns.convolutions(example.input_elements)
    totals = dict(zip(convolutions.places, convolutions.totals(example.training.batch_size).tolist(), strict=True))
    for place, layer in enumerate(example.layers):
        if current is not None and not layer.parameters:
            current[2].append(layer)
            continue
        if current is not None:
            yield current
        current = (layer, totals.get(place, 0.0), [])
    if current is not None:
        yield current


def _token(owner: LayerRecord, moved: float, followers: list[LayerRecord], example: Example) -> Token:
    batch = example.training.batch_size
    numbers = (
        log_amount(batch * owner.activations),
        log_amount(batch * sum(layer.activations for layer in followers)),
        log_amount(owner.parameters),
        log_amount(owner.output_shape[0] if owner.output_shape else 0),
        log_amount(math.prod(owner.output_shape[1:])),
        log_amount(moved),
        log_amount(len(followers)),
        float(bool(owner.output_shape) and owner.output_shape[0] % 4 != 0),
    )
    return Token(owner.kind, numbers)
