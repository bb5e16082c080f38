"""Fit a device profile to measured rows: its constants, and the copies of each workspace rule.

A trace never changes and its replay takes milliseconds, so the fit is a coordinate search: for each rule it tries a few
values that cuDNN's algorithms suggest, until no value reduces the error noticeably.
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
_MIN_GAIN = 0.02
"""A rule changes only if the error shrinks by this share; 30 rows do not resolve less."""
_LARGEST_ERROR = 0.25
"""Errors are clipped here, so that one disturbed row does not decide."""
_MAX_SWEEPS = 3


@dataclass(frozen=True)
class Sample:
    """A trace and the memory that its job used on the device."""

    trace: Trace
    used_bytes: int


@dataclass(frozen=True)
class Calibration:
    """A fitted profile and its error on the rows that it was fitted to."""

    profile: DeviceProfile
    rows: int
    median_error_before: float
    median_error_after: float
    changed: tuple[str, ...]
    """A phrase for each constant and rule that changed."""


def calibrate(profile: DeviceProfile, samples: Sequence[Sample]) -> Calibration:
    """Fit a profile; constants and rules that no row depends on stay unchanged."""
    if not samples:
        raise UserError("expected completed rows to calibrate on, found none: measure some, or name another file")
    fitter = _Fitter(samples)
    before = median(fitter.errors(profile))
    best = fitter.with_constants(profile)
    loss = fitter.loss(best)
    # rules that explain most come first, before others are fitted to their effect
    order = sorted(range(len(profile.convolution)), key=lambda index: fitter.improved(best, loss, index)[1])
    for _ in range(_MAX_SWEEPS):
        start = best
        for index in order:
            best, loss = fitter.improved(best, loss, index)
        if best == start:
            break
    return Calibration(best, len(samples), before, median(fitter.errors(best)), tuple(_changes(profile, best)))


@dataclass
class _Fitter:
    """Simulates candidate profiles; each distinct lowering of a trace is replayed once."""

    samples: Sequence[Sample]
    _reserved: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)

    def reserved_bytes(self, profile: DeviceProfile) -> list[int]:
        """Return the reserved memory of each sample on a device that is large enough."""
        large = replace(profile, total_mib=profile.total_mib * 2)  # the measured rows completed, so they must fit
        reserved = []
        for index, sample in enumerate(self.samples):
            key = (index, tuple(profile.workspace_bytes(call) for call in dict.fromkeys(sample.trace.calls)))
            if key not in self._reserved:
                self._reserved[key] = simulate(sample.trace, large, AllocatorOptions()).reserved_bytes or 0
            reserved.append(self._reserved[key])
        return reserved

    def with_constants(self, profile: DeviceProfile) -> DeviceProfile:
        """Fit the context to rows without convolutions, and cuDNN's memory to rows with them."""
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
            lacking = min(0, cudnn)  # rows with convolutions cannot separate the two
            profile = replace(profile, cudnn_mib=cudnn - lacking, context_mib=max(0, profile.context_mib + lacking))
        return profile

    def errors(self, profile: DeviceProfile) -> list[float]:
        """Return the absolute relative error of each sample."""
        pairs = zip(self.samples, self.reserved_bytes(profile), strict=True)
        return [
            abs(reserved + _overhead_bytes(profile, sample.trace) - sample.used_bytes) / sample.used_bytes
            for sample, reserved in pairs
        ]

    def loss(self, profile: DeviceProfile) -> float:
        """Return the mean clipped error, which the fit minimizes."""
        return fmean(min(error, _LARGEST_ERROR) for error in self.errors(profile))

    def improved(self, profile: DeviceProfile, loss: float, index: int) -> tuple[DeviceProfile, float]:
        """Return the profile with the best value for one rule, and its loss."""
        for copies in COPIES:
            rules = list(profile.convolution)
            rules[index] = replace(rules[index], copies=copies)
            candidate = self.with_constants(replace(profile, convolution=tuple(rules)))
            if (candidate_loss := self.loss(candidate)) < loss * (1 - _MIN_GAIN):
                profile, loss = candidate, candidate_loss
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
