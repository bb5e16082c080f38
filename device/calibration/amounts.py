"""Amounts of workspace that rules can describe, and which of them explain measured workspaces."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.profile import ConvolutionWorkspace, partial_sums_bytes, workspace_of_rule
from vramcast.virtual_gpu.tracing.trace import ConvolutionCall

COPIES = (0.0, 0.5, 1.0, 1.5, 2.0, 2.25, 3.0, 4.0)
"""Copies of a tensor: none, of half of it, whole ones, and those of Winograd's transformation (36 of 16 values)."""
ALIGNMENTS = (4, 1, 2, 8, 16, 32)
_MOST_EXTRA_MIB, _MOST_PARTIAL_SUMS = 64, 32
_ADDED = ("extra_mib", "partial_sums")
"""Fields of an amount that are 0 in most."""
_SAMPLE = 200
"""Workspaces that decide the alignment."""
TOLERANCE_BYTES = 512
"""The granularity of the allocator."""
_NEAR = 0.02
_SUPPORT = 0.004
"""An amount must explain this share of the probes that simpler ones do not explain."""


@dataclass(frozen=True, order=True)
class Amount:
    """Copies of input, output and weight, a constant, and partial sums of the result."""

    copies: float
    output_copies: float
    weight_copies: float
    extra_mib: int
    partial_sums: int = 0

    def bytes_of(self, call: ConvolutionCall, align: int) -> int:
        """Return the workspace of a call."""
        return workspace_of_rule(call, ConvolutionWorkspace(**self.fields), align)

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a rule with this amount; copies that equal those of the input are left out."""
        fields: dict[str, Any] = {"copies": self.copies}
        for name in ("output_copies", "weight_copies"):
            if getattr(self, name) != self.copies:
                fields[name] = getattr(self, name)
        return fields | {name: value for name in _ADDED if (value := getattr(self, name))}

    @property
    def complexity(self) -> tuple[int, float]:
        """A sort key: simpler amounts come first."""
        copies = self.copies + self.output_copies + self.weight_copies
        return len(self.fields), copies + self.extra_mib + self.partial_sums


def amount_of(rule: ConvolutionWorkspace) -> Amount:
    """Return the amount of a rule."""
    output, weight = (rule.copies if item is None else item for item in (rule.output_copies, rule.weight_copies))
    return Amount(rule.copies, output, weight, rule.extra_mib, rule.partial_sums)


def explains(amount: Amount, call: ConvolutionCall, workspace_bytes: int, align: int) -> bool:
    """Return True if an amount is the measured workspace, up to the granularity of the allocator."""
    return abs(amount.bytes_of(call, align) - workspace_bytes) < TOLERANCE_BYTES


@lru_cache(maxsize=2**15)  # each round of a search asks again
def _candidates(call: ConvolutionCall, workspace_bytes: int, align: int) -> tuple[Amount, ...]:
    """Return every amount that explains one workspace."""
    if workspace_bytes < TOLERANCE_BYTES:
        return (Amount(0.0, 0.0, 0.0, 0),)
    x, y, weight = (Amount(*unit, 0).bytes_of(call, align) for unit in ((1, 0, 0), (0, 1, 0), (0, 0, 1)))
    amounts = []
    for copies in product(COPIES, repeat=3):
        rest = workspace_bytes - copies[0] * x - copies[1] * y - copies[2] * weight
        extra_mib = round(rest / MIB)
        if 0 <= extra_mib <= _MOST_EXTRA_MIB and abs(rest - extra_mib * MIB) < TOLERANCE_BYTES:
            amounts.append(Amount(copies[0], copies[1], copies[2], extra_mib))
    rest = workspace_bytes - x - y - weight  # a split call copies all of its tensors
    count = round(rest / (partial_sums_bytes(call, 2) - partial_sums_bytes(call, 1)))
    if 1 <= count <= _MOST_PARTIAL_SUMS and abs(rest - partial_sums_bytes(call, count)) < TOLERANCE_BYTES:
        amounts.append(Amount(1.0, 1.0, 1.0, 0, count))
    return tuple(amounts)


def amounts_of(measured: Mapping[ConvolutionCall, int], align: int) -> list[Amount]:
    """Return the fewest amounts that explain the workspaces, those that explain most first."""
    explained = {call: _candidates(call, size, align) for call, size in measured.items()}
    least = max(3, _SUPPORT * len(measured))
    chosen: list[Amount] = []
    while explained:
        counts = Counter(amount for amounts in explained.values() for amount in amounts)
        best = min(counts, key=lambda amount: (-counts[amount], amount.complexity), default=None)
        if best is None or counts[best] < least:
            break
        chosen.append(best)
        explained = {call: amounts for call, amounts in explained.items() if best not in amounts}
    return chosen


def alignment_of(measured: Mapping[ConvolutionCall, int]) -> int:
    """Return the multiple that channels are padded to: the one under which few amounts explain most workspaces."""
    sample = {call: size for call, size in measured.items() if size}
    sample = dict(list(sample.items())[:_SAMPLE])

    def unexplained(align: int) -> int:
        amounts = amounts_of(sample, align)
        rest = sum(not any(explains(item, call, size, align) for item in amounts) for call, size in sample.items())
        return rest + len(amounts)

    return min(ALIGNMENTS, key=unexplained)


def matching(amounts: Iterable[Amount], call: ConvolutionCall, workspace_bytes: int, align: int) -> list[Amount]:
    """Return the amounts that explain a workspace; if none does, the nearest one within a few percent."""
    amounts = list(amounts)
    if exact := [item for item in amounts if explains(item, call, workspace_bytes, align)]:
        return exact

    def distance(amount: Amount) -> float:
        return abs(amount.bytes_of(call, align) - workspace_bytes) / max(workspace_bytes, MIB)

    return [item for item in sorted(amounts, key=distance)[:1] if distance(item) < _NEAR]
