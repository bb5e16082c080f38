"""Fit a device profile to measured rows: its constants, and workspace rules as far as totals show them.

A row has one total, in which the workspaces of many calls hide. A trace never changes and its replay takes
milliseconds, so rules are searched by replays: each step tries other amounts for rules, and new rules before them, and
keeps a change that lowers the error on the rows of the fit and on rows that are held out from it.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

from vramcast.device.calibration.amounts import Amount
from vramcast.device.calibration.changes import changes, moves
from vramcast.errors import UserError
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.replay.simulate import replay_on
from vramcast.virtual_gpu.tracing.trace import ConvolutionCall, Trace

AMOUNTS = (
    *(Amount(copies, copies, copies, 0) for copies in (0.0, 1.0, 2.0)),
    Amount(1.0, 0.0, 1.0, 0),
    Amount(2.25, 2.25, 4.0, 0),
    *(Amount(1.0, 1.0, 1.0, extra_mib) for extra_mib in (2, 4, 8)),
)
"""None, one or two copies, no copy of the output, Winograd's, and a copy with a constant."""
_MIN_GAIN = 0.02
"""A change must reduce the error by this share; few rows do not resolve less."""
_LARGEST_ERROR = 0.25
"""Errors are clipped here, so that one disturbed row does not decide."""
_MOVES = 60
"""Changes that a step tries, drawn from all."""
_SCREEN = 8
"""Rows with the shortest traces, on which all changes are tried; the best are tried on all rows."""
_BEST = 5
_MOST_STEPS = 12
_PATIENCE = 3
"""Steps without a change that end the search."""
_HELD_OUT = 3
"""One row of as many is held out."""
_FEWEST = 3
"""Rows of a kind that its memory is fitted to."""


@dataclass(frozen=True)
class Sample:
    """A trace and the memory that its job used on the device."""

    trace: Trace
    used_bytes: int
    reserved_bytes: int | None = None
    """The part that torch's allocator reserved, if it was measured."""


@dataclass(frozen=True)
class Calibration:
    """A fitted profile and its evidence."""

    profile: DeviceProfile
    rows: int
    median_error_before: float
    median_error_after: float
    changed: tuple[str, ...]
    """A phrase for each constant and rule that changed."""
    evidence: tuple[str, ...] = ()
    """A sentence for each source of the rules."""


def calibrate(profile: DeviceProfile, samples: Sequence[Sample], seed: int = 0, rules: bool = True) -> Calibration:
    """Fit a profile to rows: its constants, and its rules unless these are known already."""
    if not samples:
        raise UserError("expected completed rows to calibrate on, found none: measure some, or name another file")
    fitter = _Fitter(sorted(samples, key=lambda sample: len(sample.trace.events)))
    before = median(fitter.errors(profile))
    best = fitter.with_constants(profile)
    calls = [call for sample in samples for call in sample.trace.calls if isinstance(call, ConvolutionCall)]
    if rules and calls:
        best = _search(fitter, best, calls, random.Random(seed))  # noqa: S311 - a sample, no secret
    after = median(fitter.errors(best))
    return Calibration(best, len(samples), before, after, tuple(changes(profile, best)))


def _search(
    fitter: "_Fitter", best: DeviceProfile, calls: Iterable[ConvolutionCall], source: random.Random
) -> DeviceProfile:
    """Change rules as long as that lowers the error on both parts of the rows."""
    unchanged = 0
    distinct = list(dict.fromkeys(calls))
    for _ in range(_MOST_STEPS):
        candidates = moves(best, distinct, AMOUNTS)
        drawn = source.sample(candidates, min(_MOVES, len(candidates)))
        better = fitter.best_of(best, [replace(best, convolution=rules) for rules in drawn])
        unchanged = 0 if better else unchanged + 1
        best = better or best
        if unchanged == _PATIENCE:
            break
    return best


@dataclass
class _Fitter:
    """Simulates candidate profiles; each distinct lowering of a trace is replayed once."""

    samples: Sequence[Sample]
    """The samples, shortest traces first."""
    _reserved: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)

    def _reserved_bytes(self, index: int, profile: DeviceProfile) -> int:
        """Return the reserved memory of a sample on a device that is large enough."""
        trace = self.samples[index].trace
        key = (index, tuple(profile.workspace_bytes(call) for call in dict.fromkeys(trace.calls)))
        if key not in self._reserved:
            large = replace(profile, total_mib=profile.total_mib * 2)  # the measured rows completed, so they must fit
            self._reserved[key] = replay_on(trace, large, AllocatorOptions())[1].peak_reserved_bytes
        return self._reserved[key]

    def with_constants(self, profile: DeviceProfile, indices: Iterable[int] | None = None) -> DeviceProfile:
        """Fit the context to rows without convolutions, and the memory of cuDNN to rows with them."""
        rest: dict[str, list[float]] = {"plain": [], "convolution": [], "norm": []}
        for index in range(len(self.samples)) if indices is None else indices:
            sample = self.samples[index]
            trace = sample.trace
            kind = ("norm" if trace.has_batch_norm else "convolution") if trace.has_convolutions else "plain"
            reserved = sample.reserved_bytes or self._reserved_bytes(index, profile)
            rest[kind].append((sample.used_bytes - reserved) / MIB - profile.other_mib)
        if rest["plain"]:
            profile = replace(profile, context_mib=max(0, round(median(rest["plain"]))))
        if min(len(rest["convolution"]), len(rest["norm"])) >= _FEWEST:
            more = median(rest["norm"]) - median(rest["convolution"])
            profile = replace(profile, batch_norm_mib=max(0, round(more)))
        loaded = [*rest["convolution"], *(value - profile.batch_norm_mib for value in rest["norm"])]
        if not loaded:
            return profile
        cudnn = round(median(loaded)) - profile.context_mib
        lacking = min(0, cudnn)  # rows with convolutions cannot separate the two
        return replace(profile, cudnn_mib=cudnn - lacking, context_mib=max(0, profile.context_mib + lacking))

    def _error(self, index: int, profile: DeviceProfile) -> float:
        sample = self.samples[index]
        overhead = profile.overhead_bytes(sample.trace.has_convolutions, sample.trace.has_batch_norm)
        return abs(self._reserved_bytes(index, profile) + overhead - sample.used_bytes) / sample.used_bytes

    def errors(self, profile: DeviceProfile) -> list[float]:
        """Return the absolute relative error of each sample."""
        return [self._error(index, profile) for index in range(len(self.samples))]

    def _loss(self, profile: DeviceProfile, indices: Sequence[int]) -> float:
        """Return the mean clipped error, which the fit minimizes."""
        return fmean(min(self._error(index, profile), _LARGEST_ERROR) for index in indices)

    def best_of(self, profile: DeviceProfile, candidates: Sequence[DeviceProfile]) -> DeviceProfile | None:
        """Return the best candidate that is noticeably better than the profile on both parts of the rows, if any is."""
        everything = range(len(self.samples))
        held_out = everything[_HELD_OUT - 1 :: _HELD_OUT]
        fitted = [index for index in everything if index not in held_out]
        screen, parts = fitted[:_SCREEN], [part for part in (fitted, held_out) if part]
        screened = sorted(candidates, key=lambda item: self._loss(self.with_constants(item, screen), screen))[:_BEST]
        for candidate in sorted(map(self.with_constants, screened), key=lambda item: self._loss(item, fitted)):
            if all(self._loss(candidate, part) < (1 - _MIN_GAIN) * self._loss(profile, part) for part in parts):
                return candidate
        return None
