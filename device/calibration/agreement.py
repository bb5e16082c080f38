"""Compares two lists of workspace rules on convolutions that neither was learned from."""

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from vramcast.device.calibration.amounts import TOLERANCE_BYTES
from vramcast.device.calibration.borders import by_rule, near_rules
from vramcast.device.calibration.probes import Probe, random_probes, sweeps
from vramcast.virtual_gpu.profile import DeviceProfile


@dataclass(frozen=True)
class RuleAgreement:
    """How often another profile gives the workspace of the calls that one rule decides."""

    label: str
    calls: int
    equal: int

    @property
    def verdict(self) -> str:
        """'recovered' if all calls agree, 'unreachable' if the rule decides none, else 'differs'."""
        return "unreachable" if not self.calls else "recovered" if self.equal == self.calls else "differs"


@dataclass(frozen=True)
class Agreement:
    """The comparison at random, and rule by rule including calls near the limits of each."""

    calls: int
    equal: int
    rules: tuple[RuleAgreement, ...]

    def lines(self) -> Iterator[str]:
        """Yield the comparison as text."""
        yield f"{self.equal} of {self.calls} random calls that were no probes take the same workspace"
        for rule in self.rules:
            yield f"  {rule.verdict:11} {rule.equal:6} of {rule.calls:6} calls  {rule.label}"


def agreement(
    truth: DeviceProfile, other: DeviceProfile, probed: Collection[Probe], count: int, seed: int
) -> Agreement:
    """Compare a profile with the truth on `count` random calls and on calls near each rule of the truth."""
    source = random.Random(f"agreement {seed}")  # noqa: S311 - a sample, no secret
    drawn = [probe for probe in random_probes(count, source) if probe not in probed]
    rules, align = truth.convolution, truth.align_channels
    base = [*drawn, *sweeps()]  # narrow bands of channels have few random calls
    near = [probe for probe in near_rules(rules, base, align, source, per_rule=20) if probe not in probed]
    groups = by_rule(rules, dict.fromkeys((*drawn, *near)), align)
    compared = []
    for index, rule in enumerate(rules):
        decided = groups.get(index, [])
        compared.append(RuleAgreement(rule.label, len(decided), _equal(truth, other, decided)))
    return Agreement(len(drawn), _equal(truth, other, drawn), tuple(compared))


def _equal(truth: DeviceProfile, other: DeviceProfile, probes: list[Probe]) -> int:
    calls = [probe.call for probe in probes]
    return sum(abs(truth.workspace_bytes(call) - other.workspace_bytes(call)) < TOLERANCE_BYTES for call in calls)
