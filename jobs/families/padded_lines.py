"""Lines of WikiText-2 in batches that are padded to their longest line, as transformers' Trainer makes them.

No two batches have the same length, so the allocator's cache is fragmented. The lengths are assumptions about the raw
training text, stated below.
"""

import math
from collections.abc import Iterator
from random import Random

import torch
from torch import Tensor

EMPTY, HEADINGS = 0.35, 0.17
"""Assumed shares of lines without text and of headings; all others are paragraphs."""
SPECIAL_TOKENS = 2
MEAN_HEADING = 6
MEDIAN_PARAGRAPH, SIGMA = 125, 0.62
"""Tokens of a paragraph, taken to be log-normal: 2.6 million tokens in 36,718 lines."""


def line_lengths(longest: int, seed: int = 0) -> Iterator[int]:
    """Yield the tokens of lines for ever, cut to the longest that the script allows."""
    random = Random(seed)  # noqa: S311 - a sample, no secret
    while True:
        kind = random.random()
        if kind < EMPTY:
            yield SPECIAL_TOKENS
        elif kind < EMPTY + HEADINGS:
            yield SPECIAL_TOKENS + 2 + int(random.expovariate(1 / MEAN_HEADING))
        else:
            paragraph = int(random.lognormvariate(math.log(MEDIAN_PARAGRAPH), SIGMA))
            yield min(SPECIAL_TOKENS + paragraph, longest)


def padded_batches(size: int, inputs: int, longest: int, seed: int = 0) -> Iterator[tuple[Tensor, ...]]:
    """Yield batches without data for ever: `inputs` tensors as long as the longest line, and a label to each line."""
    lengths = line_lengths(longest, seed)
    while True:
        tokens = max(next(lengths) for _ in range(size))
        padded = [torch.empty(size, tokens, dtype=torch.int64, device="meta") for _ in range(inputs)]
        yield *padded, torch.empty(size, dtype=torch.int64, device="meta")
