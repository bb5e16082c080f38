"""Splits by configuration: all rows of one network stay in one part, so that no test network is trained on."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Self

from vramcast.errors import UserError
from vramcast.files.durable import replacing
from vramcast.jobs.spec import Spec

SPLIT_VERSION = 1
_TOLERANCE = 1e-6
"""Tolerance of the sum of the fractions: thirds may be written with seven digits."""


@dataclass(frozen=True)
class Split:
    """Groups of rows by part; every group is in one part."""

    seed: int
    fractions: Mapping[str, float]
    parts: Mapping[str, tuple[str, ...]]

    def part_of(self, group: str) -> str:
        """Return the part of a group."""
        try:
            return self._part_by_group[group]
        except KeyError:
            raise UserError(
                f"expected a group of the split, found {group!r}: make the split again from all rows"
            ) from None

    @cached_property
    def _part_by_group(self) -> dict[str, str]:
        return {group: name for name, groups in self.parts.items() for group in groups}

    def save(self, path: Path | str) -> None:
        """Write the split as JSON, atomically."""
        values = {
            "version": SPLIT_VERSION,
            "seed": self.seed,
            "fractions": dict(self.fractions),
            "parts": {name: list(groups) for name, groups in self.parts.items()},
        }
        with replacing(Path(path)) as temporary:
            temporary.write_text(json.dumps(values, indent=1) + "\n", encoding="ascii")

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a split written by `save`."""
        values = _read_json(Path(path))
        fault = _fault(values)
        if fault:
            raise UserError(f"expected a split in {path}, found that {fault}: make the split again")
        parts = {name: tuple(groups) for name, groups in values["parts"].items()}
        return cls(values["seed"], values["fractions"], parts)


def make_split(groups: Iterable[str], fractions: Mapping[str, float], seed: int) -> Split:
    """Shuffle the groups by the seed and cut them at the fractions; no part is empty."""
    _check_fractions(fractions)
    ordered = sorted(set(groups), key=lambda group: _draw(seed, group))
    if len(ordered) < len(fractions):
        raise UserError(
            f"expected at least {len(fractions)} groups for the parts {list(fractions)}, "
            f"found {len(ordered)}: build more rows or use fewer parts"
        )
    cuts = pairwise(_cuts(list(fractions.values()), len(ordered)))
    parts = {name: tuple(ordered[start:end]) for name, (start, end) in zip(fractions, cuts, strict=True)}
    return Split(seed, dict(fractions), parts)


def make_wide_split(units: Mapping[str, str], fractions: Mapping[str, float], seed: int) -> Split:
    """Split groups by the unit that each belongs to, such as its architecture, which stays in one part."""
    split = make_split(units.values(), fractions, seed)
    parts: dict[str, list[str]] = {name: [] for name in fractions}
    for group in sorted(units):
        parts[split.part_of(units[group])].append(group)
    return replace(split, parts={name: tuple(groups) for name, groups in parts.items()})


def make_folds(groups: Iterable[str], k: int, seed: int) -> Split:
    """Cut the groups into `k` equal parts named 'fold0', 'fold1' and so on."""
    if k < 2:
        raise UserError(f"expected two folds or more, found k={k}: raise it")
    return make_split(groups, {f"fold{index}": 1 / k for index in range(k)}, seed)


def _draw(seed: int, group: str) -> tuple[str, str]:
    text = f"{seed}:{group}".encode("utf-8", "surrogatepass")
    return hashlib.sha256(text).hexdigest(), group


def _cuts(fractions: list[float], count: int) -> list[int]:
    """Return the boundaries of the parts: rounded sums, so that no size is off by more than one."""
    cuts = [0]
    for index, total in enumerate(accumulate(fractions), 1):
        least, most = cuts[-1] + 1, count - (len(fractions) - index)
        cuts.append(min(max(math.floor(total * count + 0.5), least), most))
    return [*cuts[:-1], count]


def _check_fractions(fractions: Mapping[str, float]) -> None:
    values = list(fractions.values())
    good = bool(values) and all(_is_number(value) and 0 < value <= 1 for value in values)
    if not good or abs(math.fsum(values) - 1) > _TOLERANCE:
        raise UserError(
            f"expected fractions above 0 that sum to 1, such as train=0.8 and test=0.2, "
            f"found {dict(fractions)}: change them"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"expected a split at {path}, found: {error.strerror}; check the path") from error
    except ValueError as error:
        raise UserError(f"expected a split in {path}, found no JSON ({error}): make the split again") from error


def _fault(values: Any) -> str | None:
    """Return why a value is not a split, None if it is one."""
    if not isinstance(values, dict) or values.get("version") != SPLIT_VERSION:
        version = values.get("version") if isinstance(values, dict) else None
        return f"its version is {version!r} and not {SPLIT_VERSION}"
    seed, fractions, parts = (values.get(key) for key in ("seed", "fractions", "parts"))
    if not isinstance(seed, int) or not isinstance(fractions, dict) or not isinstance(parts, dict):
        return "it lacks a seed, fractions or parts"
    if fractions.keys() != parts.keys() or not all(map(_is_number, fractions.values())):
        return f"its fractions {fractions} do not match its parts {list(parts)}"
    if not all(isinstance(groups, list) for groups in parts.values()):
        return "its parts are not lists of groups"
    return _repeated(parts)


def _repeated(parts: Mapping[str, list[Any]]) -> str | None:
    part_by_group: dict[str, str] = {}
    for name, groups in parts.items():
        for group in groups:
            if not isinstance(group, str):
                return f"the group {group!r} is not a string"
            if group in part_by_group:
                return f"the group {group!r} is in the part {part_by_group[group]!r} and in {name!r}"
            part_by_group[group] = name
    return None


HALVES = {"even": 0, "odd": 1}
"""Fixed halves of the public rows; profiles are calibrated on networks of the even half."""


SPLIT_BY = ("network", "configuration")


def in_half(spec: Spec, half: str | None, by: str = "network") -> bool:
    """Return True if a spec is in a half.

    The hash of the network decides, or that of the whole configuration, so a half never changes.
    """
    key = spec.group if by == "network" else spec.id
    return half is None or int(key, 16) % 2 == HALVES[half]
