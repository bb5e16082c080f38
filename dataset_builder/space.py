"""Spaces: factors with their levels and ranges, and the specs that their values describe."""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vramcast.errors import UserError, check_count, check_flag
from vramcast.jobs import expressions
from vramcast.jobs.families import EXTERNAL_FAMILIES, make_spec
from vramcast.jobs.families.drawn_configs import FUNCTIONS, names_of
from vramcast.jobs.families.template import mutate
from vramcast.jobs.spec import Spec
from vramcast.virtual_gpu.canonical import canonical_json, from_mapping
from vramcast.virtual_gpu.training.setup import TrainingSetup

Assignment = dict[str, Any]
"""A value for every factor."""

_DEFAULT_LEVELS = 4
_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "choice": (),
    "int": ("step", "log", "levels"),
    "float": ("log", "levels"),
    "names": (),
}
"""The kinds of factors in a configuration, and the settings of each kind."""


class Factor(ABC):
    """A quantity that a sampler varies. Its bounds may depend on earlier factors."""

    level_count: int

    @abstractmethod
    def draw(self, rng: np.random.RandomState, context: Assignment) -> Any:
        """Draw a value uniformly."""

    @abstractmethod
    def level(self, index: int, count: int, context: Assignment) -> Any:
        """Return the value of level `index` if the factor has `count` levels."""

    @abstractmethod
    def bin(self, value: Any, context: Assignment) -> int:
        """Return which of `level_count` equal parts of the factor contains a value."""


@dataclass(frozen=True)
class Choice(Factor):
    """One of several equally likely values."""

    values: tuple[Any, ...]

    @property
    def level_count(self) -> int:  # type: ignore[override]
        """Number of values: each is a level."""
        return len(self.values)

    def draw(self, rng: np.random.RandomState, context: Assignment) -> Any:
        """Draw a value with the random stream of `numpy.random.choice`."""
        return self.values[rng.randint(0, len(self.values))]

    def level(self, index: int, count: int, context: Assignment) -> Any:
        """Return a value; fewer levels than values are spread evenly over the list."""
        return self.values[index * len(self.values) // count]

    def bin(self, value: Any, context: Assignment) -> int:
        """Return the index of the value."""
        return self.values.index(value)


@dataclass(frozen=True)
class Range(Factor):
    """Numbers from `low` to `high`, excluding `high`."""

    low: float | str
    high: float | str
    whole: bool
    step: int = 1
    log: bool = False
    level_count: int = _DEFAULT_LEVELS
    name: str = "a range"

    def draw(self, rng: np.random.RandomState, context: Assignment) -> Any:
        """Draw a number, rounded down to the step if whole, with the random stream of `numpy.random.uniform`."""
        return self._at(rng.random_sample(), context)

    def level(self, index: int, count: int, context: Assignment) -> Any:
        """Return one of `count` evenly spaced levels that include both ends of the range."""
        return self._at(index / (count - 1) if count > 1 else 0.5, context)

    def bin(self, value: Any, context: Assignment) -> int:
        """Return the part of the range that contains a value; a logarithmic range has parts of equal ratio."""
        low, high = self.bounds(context)
        if self.log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        share = (value - low) / (high - low) if high > low else 0.0
        return min(max(int(share * self.level_count), 0), self.level_count - 1)

    def bounds(self, context: Assignment) -> tuple[float, float]:
        """Evaluate low and high with the values of earlier factors."""
        scope = expressions.scope(context)
        low, high = (
            expressions.evaluate(text, scope) if isinstance(text, str) else text for text in (self.low, self.high)
        )
        numbers = isinstance(low, int | float) and isinstance(high, int | float)
        if not numbers or not low <= high or (self.log and low <= 0):
            raise UserError(
                f"expected a range from low to high for {self.name}, above 0 where it is logarithmic, "
                f"found {low} to {high}: change it"
            )
        return low, high

    def _at(self, share: float, context: Assignment) -> Any:
        low, high = self.bounds(context)
        if not self.whole:
            return low * (high / low) ** share if self.log else low + (high - low) * share
        start, end = low / self.step, high / self.step
        exact = start * (end / start) ** share if self.log else start + (end - start) * share
        last = max(math.ceil(end) - 1, math.floor(start))
        return min(int(exact), last) * self.step


def parse_factor(name: str, settings: Mapping[str, Any]) -> Factor:
    """Parse a factor: {choice: [...]}, {names: timm}, {int: [low, high]} or {float: [low, high]}, with options."""
    kinds = [kind for kind in _SETTINGS if isinstance(settings, Mapping) and kind in settings]
    if len(kinds) != 1 or settings.keys() - {kinds[0], *_SETTINGS[kinds[0]]}:
        allowed = ", ".join(
            f"{kind} (with {', '.join(names)} at most)" if names else kind for kind, names in _SETTINGS.items()
        )
        raise UserError(f"expected factor {name} to have one of {allowed}, found {settings!r}: change the space")
    values = settings[kinds[0]]
    if kinds[0] == "names":
        return Choice(names_of(values))
    if kinds[0] == "choice":
        if not isinstance(values, list | tuple) or not values:
            raise UserError(f"expected factor {name} to have a list of choices, found {values!r}: change the space")
        return Choice(tuple(values))
    if not isinstance(values, list | tuple) or len(values) != 2:
        raise UserError(f"expected factor {name} to have [low, high], found {values!r}: change the space")
    return _parse_range(name, kinds[0], *values, **{key: settings[key] for key in settings if key != kinds[0]})


def _parse_range(
    name: str, kind: str, low: Any, high: Any, step: int = 1, log: bool = False, levels: int = _DEFAULT_LEVELS
) -> Range:
    check_count(f"levels of factor {name}", levels)
    check_count(f"step of factor {name}", step)
    check_flag(f"log of factor {name}", log)
    factor = Range(low, high, kind == "int", step, log, levels, f"factor {name}")
    if not isinstance(low, str) and not isinstance(high, str):  # bounds without expressions can be checked now
        factor.bounds({})
        if factor.whole and low % step:
            raise UserError(f"expected factor {name} to begin at a multiple of {step}, found {low}: change the space")
    return factor


@dataclass(frozen=True)
class Space:
    """All configurations of a family that a build may draw.

    In `network` and `training`, a string that starts with '=' is an expression over the factors.
    """

    name: str
    family: str
    factors: Mapping[str, Factor]
    network: Mapping[str, Any]
    training: Mapping[str, Any]
    structure: tuple[str, ...] = field(default=())
    """The factors of TBEM's structure array; the others are hyper-parameters."""

    def draw(self, rng: np.random.RandomState) -> Assignment:
        """Draw every factor uniformly, in order."""
        values: Assignment = {}
        for name, factor in self.factors.items():
            values[name] = factor.draw(rng, values)
        return values

    def spec(self, values: Assignment) -> Spec:
        """Return the spec of an assignment."""
        scope = expressions.scope(values, {"mutate": mutate, **FUNCTIONS})
        network = {key: _resolve(value, scope) for key, value in self.network.items()}
        training = {key: _resolve(value, scope) for key, value in self.training.items()}
        setup = from_mapping(TrainingSetup, training, "the training setup")
        if self.family in EXTERNAL_FAMILIES:
            return Spec(self.family, json.loads(canonical_json(network)), setup)
        return make_spec(self.family, network, setup)


@dataclass(frozen=True)
class SpaceMixture(Space):
    """Several spaces, of which each configuration comes from one. An assignment has the part, and its own values.

    Its only factor is the part, which is what coverage counts.
    """

    parts: Mapping[str, Space] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    drawn: tuple[str, ...] = ()
    """Parts that are always drawn uniformly: an array over the names of a library would be vast."""

    def spec(self, values: Assignment) -> Spec:
        """Return the spec of an assignment."""
        return self.parts[values["part"]].spec(values["values"])


def _resolve(value: Any, scope: dict[str, Any]) -> Any:
    if isinstance(value, str) and value.startswith("="):
        return expressions.evaluate(value[1:].strip(), scope)
    return value


def parse_space(settings: Mapping[str, Any]) -> Space:
    """Parse a space, or a mixture of spaces with their weights."""
    return _parse_mixture(settings) if "parts" in settings else _parse_single(settings)


def _parse_mixture(settings: Mapping[str, Any]) -> SpaceMixture:
    parts, weights = settings["parts"], settings.get("weights", {})
    if not isinstance(parts, Mapping) or not isinstance(weights, Mapping) or parts.keys() != weights.keys():
        raise UserError(
            f"expected parts and a weight for each in the space {settings.get('name')}, found the parts "
            f"{sorted(parts)} and the weights {dict(weights)}: change the space"
        )
    for name, weight in weights.items():
        if not isinstance(weight, int | float) or weight < 0:
            raise UserError(f"expected a weight from 0 for the part {name}, found {weight!r}: change the space")
    spaces = {name: _parse_single(part) for name, part in parts.items()}
    drawn = tuple(settings.get("drawn", ()))
    if set(drawn) - spaces.keys() or not any(weights.values()):
        raise UserError(
            f"expected drawn parts of {sorted(spaces)} and weights above 0, found {drawn}: change the space"
        )
    factors = {"part": Choice(tuple(spaces))}
    return SpaceMixture(
        str(settings["name"]), "mixture", factors, {}, {}, parts=spaces, weights=dict(weights), drawn=drawn
    )


def _parse_single(settings: Mapping[str, Any]) -> Space:
    """Parse a space; its factors are a mapping, or pairs of a name and settings."""
    values = {"structure": (), **settings}
    kinds: Mapping[str, type | tuple[type, ...]] = {
        "name": str,
        "family": str,
        "factors": (dict, list),
        "network": dict,
        "training": dict,
        "structure": (list, tuple),
    }
    for key, kind in kinds.items():
        if key in values and not isinstance(values[key], kind):
            raise UserError(f"expected the space to have {key} as in conf/space, found {values[key]!r}: change it")
    if not values.get("factors"):
        raise UserError("expected a space with factors, found none: name one with space=NAME")
    factors = {name: parse_factor(name, factor) for name, factor in dict(values["factors"]).items()}
    invalid = [name for name in factors if not str(name).isidentifier() or str(name).startswith("_")]
    if invalid:
        raise UserError(f"expected factor names that expressions can use, found {invalid}: rename them")
    unknown = sorted(map(str, {*values["structure"]} - factors.keys()))
    if unknown:
        raise UserError(f"expected the structure to name factors, found {unknown}: choose from {sorted(factors)}")
    return from_mapping(Space, {**values, "factors": factors, "structure": tuple(values["structure"])}, "the space")
