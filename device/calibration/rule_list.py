"""Learns a list of workspace rules from measured calls: the first rule that matches a call applies.

Rules are found one after another, each for calls that no earlier rule matches: of all conjunctions of conditions that
leave one amount only, the one that covers most calls. Sets of calls are the bits of integers.
"""

import heapq
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import log2
from typing import Any

from vramcast.device.calibration.amounts import Amount, amount_of
from vramcast.device.calibration.borders import deciding_rule
from vramcast.virtual_gpu.profile import CONDITIONS, ConvolutionWorkspace, features_of
from vramcast.virtual_gpu.tracing.trace import ConvolutionCall

Condition = tuple[str, Any]
_Rule = tuple[tuple[Condition, ...], Amount]
_LIMITS = tuple(name for name in CONDITIONS if name.startswith(("max_", "min_")))
_CHOICES: Mapping[str, tuple[Any, ...]] = {
    "direction": ("forward", "data", "weight"),
    "places": tuple(2**power for power in range(1, 11)),
    **dict.fromkeys(("aligned", "aligned_outputs", "pointwise", "grouped", "depthwise"), (True, False)),
}
_MOST_CONDITIONS = 6
_BEAM = 6
_LEAST_CALLS = 3
"""A rule must cover as many calls, or it would describe a single one."""
_CONDITION_COST = 0.85
"""Factor on the calls that a rule covers for each of its conditions, so that simple rules come first."""


@dataclass(frozen=True)
class _Candidate:
    """A conjunction of conditions, and the calls that it covers."""

    conditions: tuple[Condition, ...]
    right: int
    wrong: int

    @property
    def value(self) -> float:
        return self.right.bit_count() * _CONDITION_COST ** len(self.conditions)


def learn_rules(
    calls: Sequence[ConvolutionCall], amounts: Sequence[Sequence[Amount]], align: int
) -> tuple[ConvolutionWorkspace, ...]:
    """Return rules that give each call one of its amounts; calls without an amount are left out."""
    masks, by_amount, everything = _labelled(calls, amounts, align)
    rest = everything
    chosen: list[_Rule] = []
    while rest:
        conditions, amount = _best_rule(masks, by_amount, rest)
        chosen.append((conditions, amount))
        if not conditions:
            break
        rest &= ~_covered(masks, conditions)
    return tuple(_rule(*item) for item in _simplified(chosen, masks, by_amount, everything))


def learn_exceptions(
    rules: Sequence[ConvolutionWorkspace],
    calls: Sequence[ConvolutionCall],
    amounts: Sequence[Sequence[Amount]],
    align: int,
) -> tuple[ConvolutionWorkspace, ...]:
    """Return the rules with exceptions before each, learned from the calls that it decides."""
    decided: dict[int, list[int]] = {}
    for index, call in enumerate(calls):
        place = deciding_rule(rules, call, align)
        if place is not None and amounts[index]:
            decided.setdefault(place, []).append(index)
    chosen: list[_Rule] = []
    for place, rule in enumerate(rules):
        members = decided.get(place)
        own: tuple[ConvolutionWorkspace, ...] = (rule,)
        if members:
            own = learn_rules([calls[index] for index in members], [amounts[index] for index in members], align)
        chosen += [(_joined(rule.conditions, item.conditions), amount_of(item)) for item in own]
    masks, by_amount, everything = _labelled(calls, amounts, align)
    measured = [item for item in chosen if all(condition in masks for condition in item[0]) and item[1] in by_amount]
    return tuple(_rule(*item) for item in _simplified(measured, masks, by_amount, everything))


def _joined(*conditions: Mapping[str, Any]) -> tuple[Condition, ...]:
    """Return the conditions that hold if all of several conjunctions hold; of two limits, the narrower one."""
    joined: dict[str, Any] = {}
    for name, value in (item for part in conditions for item in part.items()):
        narrower = min if name.startswith("max_") else max
        joined[name] = narrower(joined[name], value) if name in joined else value
    return tuple(joined.items())


def _labelled(
    calls: Sequence[ConvolutionCall], amounts: Sequence[Sequence[Amount]], align: int
) -> tuple[dict[Condition, int], dict[Amount, int], int]:
    """Return the calls that meet each condition, those that each amount explains, and all with an amount, as bits."""
    labelled = [index for index, possible in enumerate(amounts) if possible]
    by_amount: dict[Amount, int] = {}
    for index in labelled:
        for amount in amounts[index]:
            by_amount[amount] = by_amount.get(amount, 0) | 1 << index
    masks = _masks([(index, features_of(calls[index], align)) for index in labelled])
    return masks, by_amount, sum(1 << index for index in labelled)


def _rule(conditions: Iterable[Condition], amount: Amount) -> ConvolutionWorkspace:
    return ConvolutionWorkspace(**dict(conditions), **amount.fields)


def _masks(items: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[Condition, int]:
    """Return the calls that meet each condition which separates any."""
    by_value: dict[str, dict[Any, int]] = {}
    for index, features in items:
        for feature, value in features.items():
            values = by_value.setdefault(feature, {})
            values[value] = values.get(value, 0) | 1 << index
    masks: dict[Condition, int] = {}
    for name, limit in _all_conditions([features for _, features in items]):
        feature, compare = CONDITIONS[name]
        met = (bits for value, bits in by_value[feature].items() if value is not None and compare(value, limit))
        mask = reduce(operator.or_, met, 0)
        if 0 < mask.bit_count() < len(items):
            masks[name, limit] = mask
    return masks


def _all_conditions(features: Sequence[Mapping[str, Any]]) -> Iterator[Condition]:
    for name, choices in _CHOICES.items():
        yield from ((name, choice) for choice in choices)
    for name in (*_LIMITS, "kernel"):
        values = {item[CONDITIONS[name][0]] for item in features} - {None}
        yield from ((name, value) for value in sorted(values))


def _covered(masks: Mapping[Condition, int], conditions: Iterable[Condition]) -> int:
    covered = -1
    for condition in conditions:
        covered &= masks[condition]
    return covered


def _best_rule(masks: Mapping[Condition, int], by_amount: Mapping[Amount, int], rest: int) -> _Rule:
    """Return the rule that covers most of the rest; the most frequent amount of all if none covers enough."""
    most = max(by_amount, key=lambda amount: (by_amount[amount] & rest).bit_count())
    if not rest & ~by_amount[most]:
        return (), most
    best, best_amount = _Candidate((), 0, 0), most
    for amount in sorted(by_amount, key=lambda item: (by_amount[item] & rest).bit_count(), reverse=True):
        mask = by_amount[amount]
        candidate = _best_conjunction(masks, _Candidate((), rest & mask, rest & ~mask), best.value)
        if candidate is not None:
            best, best_amount = candidate, amount
    return (best.conditions, best_amount) if best.right.bit_count() >= _LEAST_CALLS else ((), most)


def _best_conjunction(masks: Mapping[Condition, int], start: _Candidate, least: float) -> _Candidate | None:
    """Return the conjunction of the highest value above `least` that covers no wrong call; None if there is none."""
    best, beam = None, [start]
    share = start.right.bit_count() / (start.right | start.wrong).bit_count()
    for _ in range(_MOST_CONDITIONS):
        longer: dict[tuple[int, int], tuple[Condition, ...]] = {}
        for shorter in beam:
            for conditions, right, wrong in _extended(masks, shorter, least):
                if wrong:
                    longer.setdefault((right, wrong), conditions)
                elif (candidate := _Candidate(conditions, right, wrong)).value > least:
                    best, least = candidate, candidate.value
        chosen = heapq.nlargest(_BEAM, longer.items(), key=lambda item: _gain(item[0], share))
        beam = [_Candidate(conditions, *covered) for covered, conditions in chosen]
    return best


def _gain(covered: tuple[int, int], share: float) -> float:
    """Return how much better than a share of right calls this is, times the calls (the measure of FOIL)."""
    right, wrong = (calls.bit_count() for calls in covered)
    return right * log2(right / (right + wrong) / share)


def _extended(
    masks: Mapping[Condition, int], start: _Candidate, least: float
) -> Iterator[tuple[tuple[Condition, ...], int, int]]:
    """Yield the candidate with one more condition each, without those that cannot reach a value above `least`."""
    used = {name for name, _ in start.conditions}
    fewest = least / _CONDITION_COST ** (len(start.conditions) + 1)
    for condition, mask in masks.items():
        right = start.right & mask
        if right.bit_count() > fewest and condition[0] not in used and (wrong := start.wrong & mask) != start.wrong:
            yield (*start.conditions, condition), right, wrong


def _simplified(
    rules: Sequence[_Rule], masks: Mapping[Condition, int], by_amount: Mapping[Amount, int], everything: int
) -> list[_Rule]:
    """Remove rules and conditions as long as no more calls are wrong without them."""

    def wrong(items: Sequence[_Rule]) -> int:
        rest, count = everything, 0
        for conditions, amount in items:
            covered = rest & _covered(masks, conditions)
            count += (covered & ~by_amount[amount]).bit_count()
            rest &= ~covered
        return count + rest.bit_count()

    simplest, errors = list(rules), wrong(rules)
    while shorter := next((item for item in _shorter(simplest) if wrong(item) <= errors), None):
        simplest = shorter
    return simplest


def _shorter(rules: Sequence[_Rule]) -> Iterator[list[_Rule]]:
    """Yield the rules without one of them, then without one of the conditions; the last rule matches all calls."""
    for index in range(len(rules) - 1):
        yield [*rules[:index], *rules[index + 1 :]]
    for index, (conditions, amount) in enumerate(rules):
        for left_out in conditions:
            shorter = tuple(item for item in conditions if item != left_out)
            if shorter:
                yield [*rules[:index], (shorter, amount), *rules[index + 1 :]]
