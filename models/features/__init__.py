"""Features of an example: named numbers in four feature sets, and tokens."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vramcast.errors import check_choice
from vramcast.models.example import Example
from vramcast.models.features.full import (
    full_numbers,
    scheduled_need_bytes,
    scheduled_numbers,
    simulated_need_bytes,
    table_numbers,
)
from vramcast.models.features.published import published_numbers
from vramcast.models.features.tokens import TOKEN_NUMBERS, Token, tokens_of


@dataclass(frozen=True)
class FeatureSet:
    """The numbers of an example, and the reference in bytes that its gap is relative to."""

    name: str
    numbers: Callable[[Example], dict[str, float]]
    reference_bytes: Callable[[Example], int]
    needs_simulation: bool


def _static_bytes(example: Example) -> int:
    return example.static.total_bytes


FEATURE_SETS: Mapping[str, FeatureSet] = {
    "gpumemnet": FeatureSet("gpumemnet", published_numbers, _static_bytes, needs_simulation=False),
    "layers": FeatureSet("layers", table_numbers, _static_bytes, needs_simulation=False),
    "schedule": FeatureSet("schedule", scheduled_numbers, scheduled_need_bytes, needs_simulation=False),
    "full": FeatureSet("full", full_numbers, simulated_need_bytes, needs_simulation=True),
}


def feature_set(name: str) -> FeatureSet:
    """Return the feature set of that name."""
    check_choice("features", name, FEATURE_SETS)
    return FEATURE_SETS[name]


__all__ = ["FEATURE_SETS", "TOKEN_NUMBERS", "FeatureSet", "Token", "feature_set", "tokens_of"]
