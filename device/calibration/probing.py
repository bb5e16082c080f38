"""Finds workspace rules by measuring probes: first a design, then what the rules of each round leave open.

After each round the rules are checked on probes that they were not learned from: at random, on both sides of every
limit, and around calls of every rule. They learn from their mistakes, until two rounds in a row have none.
"""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from vramcast.device.calibration.amounts import TOLERANCE_BYTES, Amount, alignment_of, amounts_of, matching
from vramcast.device.calibration.borders import by_rule, near_rules, workspace_by
from vramcast.device.calibration.probes import Measure, Probe, design, neighbours, random_probes, sweeps
from vramcast.device.calibration.rule_list import learn_exceptions, learn_rules
from vramcast.virtual_gpu.profile import ConvolutionWorkspace
from vramcast.virtual_gpu.tracing.trace import ConvolutionCall

_DESIGN = 900
_CHECKS = 600
"""Random probes that the rules of a round are checked on."""
_MOST_ROUNDS = 20
_RIGHT_ROUNDS = 2
_MISTAKES = 60
"""Mistakes of a round that the next one learns from."""
_AROUND = 3
"""Mistakes of a round whose neighbours are measured."""
_A_BAND = 3
"""Wrong probes in a row that are more than a disturbance."""
_A_RULE = 4
"""Probes of each rule whose neighbours are checked."""


@dataclass
class RuleSearch:
    """The probes measured so far, and the rules that they led to."""

    measure: Measure
    seed: int = 0
    learned: dict[Probe, int] = field(default_factory=dict)
    """Workspaces that rules are learned from."""
    checked: dict[Probe, int] = field(default_factory=dict)
    """Workspaces that no rule was learned from."""
    align: int = 4
    amounts: list[Amount] = field(default_factory=list)
    rules: tuple[ConvolutionWorkspace, ...] = ()
    shares: list[float] = field(default_factory=list)
    """Share of the new random probes of each round that the rules had right."""

    def run(self) -> None:
        """Measure and learn until two rounds in a row make no mistake, or for as many rounds as are allowed."""
        self._add(design(_DESIGN, self.seed))
        self.align = alignment_of(_calls(self.learned))
        right = 0
        for number in range(1, _MOST_ROUNDS + 1):
            self._learn()
            mistakes = self._check(random.Random(f"{self.seed} {number}"))  # noqa: S311 - a sample, no secret
            right = 0 if mistakes else right + 1
            if right == _RIGHT_ROUNDS or number == _MOST_ROUNDS:
                break
            self._learn_from(mistakes)
        self._add_exceptions()

    def _add_exceptions(self) -> None:
        """Look along the channels for bands in which rules are wrong, and learn exceptions to these rules."""
        rules, along = self.rules, sweeps()
        self.checked |= self._measured(along)
        wrong = set(self.wrong(self.checked))
        if not any(wrong.issuperset(along[start : start + _A_BAND]) for start in range(len(along) - _A_BAND + 1)):
            return
        for number in range(_MOST_ROUNDS):
            source = random.Random(f"{self.seed} exceptions {number}")  # noqa: S311 - a sample, no secret
            if number:
                near = near_rules(self.rules, list(self.learned), self.align, source, _A_RULE)
                self.checked |= self._measured(near)
            mistakes = self._mistakes(source)
            if not mistakes:
                return
            self._learn_from(mistakes)
            self.rules = learn_exceptions(rules, *self._labelled(), self.align)

    def _check(self, source: random.Random) -> list[Probe]:
        """Measure new probes, and return some of all those that the rules have wrong."""
        fresh = self._measured(random_probes(_CHECKS, source))
        self.shares.append(1 - len(self.wrong(fresh)) / max(1, len(fresh)))
        self.checked |= fresh
        self.checked |= self._measured(near_rules(self.rules, list(self.learned), self.align, source, _A_RULE))
        return self._mistakes(source)

    def _mistakes(self, source: random.Random) -> list[Probe]:
        """Return some of all checked probes that the rules have wrong."""
        mistakes = self.wrong(self.checked)
        return source.sample(mistakes, min(_MISTAKES, len(mistakes)))

    def _learn_from(self, mistakes: Sequence[Probe]) -> None:
        """Add mistakes and the neighbours of some to the probes that rules are learned from."""
        self.learned |= {probe: self.checked.pop(probe) for probe in mistakes}
        self._add(near for probe in mistakes[:_AROUND] for near in neighbours(probe))

    def _measured(self, probes: Iterable[Probe]) -> Mapping[Probe, int]:
        new = [probe for probe in dict.fromkeys(probes) if probe not in self.learned and probe not in self.checked]
        return self.measure(new)

    def _add(self, probes: Iterable[Probe]) -> None:
        self.learned |= self._measured(probes)

    def _learn(self) -> None:
        self.rules = learn_rules(*self._labelled(), self.align)

    def _labelled(self) -> tuple[list[ConvolutionCall], list[list[Amount]]]:
        """Return the calls of all learned probes, each with the amounts that explain its workspace."""
        calls = _calls(self.learned)
        self.amounts = amounts_of(calls, self.align)
        return list(calls), [matching(self.amounts, call, size, self.align) for call, size in calls.items()]

    def wrong(self, measured: Mapping[Probe, int]) -> list[Probe]:
        """Return the probes whose workspace the rules do not give."""
        return [
            probe
            for probe, size in measured.items()
            if abs(workspace_by(self.rules, probe.call, self.align) - size) >= TOLERANCE_BYTES
        ]

    def evidence(self) -> Iterator[str]:
        """Yield how many probes each rule decides, and how many of those that no rule was learned from are right."""
        wrong = set(self.wrong(self.checked))
        learned, checked = (by_rule(self.rules, probes, self.align) for probes in (self.learned, self.checked))
        for index, rule in enumerate(self.rules):
            tested = checked.get(index, [])
            right = sum(probe not in wrong for probe in tested)
            yield f"{rule.label}: {len(learned.get(index, []))} probes, {right} of {len(tested)} others right"


def _calls(measured: Mapping[Probe, int]) -> dict[ConvolutionCall, int]:
    return {probe.call: size for probe, size in measured.items()}
