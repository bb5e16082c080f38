"""Probes where rules are decided: on both sides of their limits, and around calls that they match."""

import random
from collections.abc import Iterable, Iterator, Sequence

from vramcast.device.calibration.probes import Probe, moved, neighbours
from vramcast.virtual_gpu.profile import CONDITIONS, ConvolutionWorkspace, features_of, workspace_of_rule
from vramcast.virtual_gpu.tracing.trace import ConvolutionCall

Rules = Sequence[ConvolutionWorkspace]


def deciding_rule(rules: Rules, call: ConvolutionCall, align: int) -> int | None:
    """Return the index of the first rule that matches a call."""
    return next((index for index, rule in enumerate(rules) if rule.matches(call, align)), None)


def workspace_by(rules: Rules, call: ConvolutionCall, align: int) -> int:
    """Return the workspace of a call by a list of rules."""
    index = deciding_rule(rules, call, align)
    return 0 if index is None else workspace_of_rule(call, rules[index], align)


def by_rule(rules: Rules, probes: Iterable[Probe], align: int) -> dict[int | None, list[Probe]]:
    """Return the probes that each rule decides."""
    groups: dict[int | None, list[Probe]] = {}
    for probe in probes:
        groups.setdefault(deciding_rule(rules, probe.call, align), []).append(probe)
    return groups


def near_rules(
    rules: Rules, probes: Sequence[Probe], align: int, source: random.Random, per_rule: int
) -> Iterator[Probe]:
    """Yield probes on both sides of the limits of each rule, and neighbours of some that it decides."""
    groups = by_rule(rules, probes, align)
    for index, rule in enumerate(rules):
        decided = groups.get(index, [])
        for name, limit in rule.conditions.items():
            if name.startswith(("max_", "min_")):
                yield from _border(probes, decided, name, limit, align, per_rule)
        for probe in source.sample(decided, min(per_rule, len(decided))):
            yield from neighbours(probe)


def _border(
    probes: Sequence[Probe], decided: Sequence[Probe], name: str, limit: float, align: int, most: int
) -> Iterator[Probe]:
    """Yield probes at a limit, beyond it, and between it and the next value of all probes."""
    feature, sign = CONDITIONS[name][0], 1 if name.startswith("max_") else -1
    values = {probe: features_of(probe.call, align)[feature] for probe in probes}
    beyond = [sign * value for value in values.values() if sign * value > sign * limit]
    outside = sign * min(beyond, default=sign * limit)
    steps = {limit, limit + sign, *(limit + (outside - limit) * part // 4 for part in (1, 2, 3)), outside}
    for probe in sorted(decided, key=lambda probe: abs(values[probe] - limit))[:most]:
        for value in sorted(steps):
            yield from moved(probe, feature, value)
