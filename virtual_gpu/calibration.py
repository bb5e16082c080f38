"""Fitting a device profile to measured rows: its constants, and how many copies each workspace rule stands for.

A replay takes milliseconds and a trace never changes, so candidates are simply tried: rule by rule, from a few values
that cuDNN's ways of computing suggest, until none is better by more than chance would make it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

from vramcast.errors import UserError
from vramcast.virtual_gpu.allocator import AllocatorOptions
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.simulate import simulate
from vramcast.virtual_gpu.sizes import MIB
from vramcast.virtual_gpu.trace import Trace

COPIES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)
_LEAST_GAIN = 0.02
"""A rule is changed only where the error shrinks by this share: 30 rows cannot tell finer."""
_LARGEST_ERROR = 0.25
"""One row that something else disturbed must not decide."""
_MOST_SWEEPS = 3


@dataclass(frozen=True)
class Sample:
    """A trace, and what its job used on the device."""

    trace: Trace
    used_bytes: int


@dataclass(frozen=True)
class Calibration:
    """A fitted profile, and how near it comes to the rows that it was fitted to."""

    profile: DeviceProfile
    rows: int
    median_error_before: float
    median_error_after: float
    changed: tuple[str, ...]
    """What became of each constant and rule that was changed, a phrase each."""


def calibrate(profile: DeviceProfile, samples: Sequence[Sample]) -> Calibration:
    """Fit a profile; where rows say nothing of a constant or a rule, it stays as it was."""
    if not samples:
        raise UserError("expected completed rows to calibrate on, found none: measure some, or name another file")
    fitter = _Fitter(samples)
    before = median(fitter.errors(profile))
    best = fitter.with_constants(profile)
    loss = fitter.loss(best)
    # the rule that explains most comes first, or another would bend to explain it
    order = sorted(range(len(profile.convolution)), key=lambda index: fitter.improved(best, loss, index)[1])
    for _ in range(_MOST_SWEEPS):
        start = best
        for index in order:
            best, loss = fitter.improved(best, loss, index)
        if best == start:
            break
    return Calibration(best, len(samples), before, median(fitter.errors(best)), tuple(_changes(profile, best)))


@dataclass
class _Fitter:
    """Simulates candidates, each distinct lowering of a trace once."""

    samples: Sequence[Sample]
    _reserved: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)

    def reserved_bytes(self, profile: DeviceProfile) -> list[int]:
        """What the allocator reserves for each sample, with all the room that there is."""
        roomy = replace(profile, total_mib=profile.total_mib * 2)  # the rows completed, so they fit
        found = []
        for index, sample in enumerate(self.samples):
            key = (index, tuple(profile.workspace_bytes(call) for call in dict.fromkeys(sample.trace.calls)))
            if key not in self._reserved:
                self._reserved[key] = simulate(sample.trace, roomy, AllocatorOptions()).reserved_bytes or 0
            found.append(self._reserved[key])
        return found

    def with_constants(self, profile: DeviceProfile) -> DeviceProfile:
        """The context from rows without convolutions, what cuDNN adds from rows with them."""
        pairs = zip(self.samples, self.reserved_bytes(profile), strict=True)
        rest: dict[bool, list[float]] = {True: [], False: []}
        for sample, reserved in pairs:
            trace = sample.trace
            norm_mib = profile.batch_norm_mib if trace.has_convolutions and trace.has_batch_norm else 0
            rest[trace.has_convolutions].append((sample.used_bytes - reserved) / MIB - profile.other_mib - norm_mib)
        if rest[False]:
            profile = replace(profile, context_mib=max(0, round(median(rest[False]))))
        if rest[True]:
            cudnn = round(median(rest[True])) - profile.context_mib
            lacking = min(0, cudnn)  # rows with convolutions alone cannot tell the two apart
            profile = replace(profile, cudnn_mib=cudnn - lacking, context_mib=max(0, profile.context_mib + lacking))
        return profile

    def errors(self, profile: DeviceProfile) -> list[float]:
        """Relative errors, all positive."""
        pairs = zip(self.samples, self.reserved_bytes(profile), strict=True)
        return [
            abs(reserved + _overhead_bytes(profile, sample.trace) - sample.used_bytes) / sample.used_bytes
            for sample, reserved in pairs
        ]

    def loss(self, profile: DeviceProfile) -> float:
        """What is made small."""
        return fmean(min(error, _LARGEST_ERROR) for error in self.errors(profile))

    def improved(self, profile: DeviceProfile, loss: float, index: int) -> tuple[DeviceProfile, float]:
        """The profile with the best value for one rule, if it is better than the present one."""
        for copies in COPIES:
            rules = list(profile.convolution)
            rules[index] = replace(rules[index], copies=copies)
            candidate = self.with_constants(replace(profile, convolution=tuple(rules)))
            if (found := self.loss(candidate)) < loss * (1 - _LEAST_GAIN):
                profile, loss = candidate, found
        return profile, loss


def _overhead_bytes(profile: DeviceProfile, trace: Trace) -> int:
    return profile.overhead_bytes(trace.has_convolutions, trace.has_batch_norm)


def _changes(old: DeviceProfile, new: DeviceProfile) -> list[str]:
    changes = [
        f"{name} {getattr(old, name)} -> {getattr(new, name)}"
        for name in ("context_mib", "cudnn_mib")
        if getattr(old, name) != getattr(new, name)
    ]
    for before, after in zip(old.convolution, new.convolution, strict=True):
        if before != after:
            changes.append(f"{before.label}: copies {before.copies:g} -> {after.copies:g}")
    return changes
