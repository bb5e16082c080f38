"""Uncertainty of a network's estimate: the strata that a job is calibrated in, and the score of an error.

A score is the log ratio of need to estimate with a constant part added to both.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vramcast.jobs.families import FAMILIES
from vramcast.models.calibration import EVERYTHING, CalibratedErrors
from vramcast.models.distribution import own_bytes_of
from vramcast.models.example import Example
from vramcast.virtual_gpu.allocator.sizes import MIB

Array = NDArray[np.float64]

_STEADY_BYTES = 512 * MIB
"""Errors that do not grow with a job, such as one more segment or another workspace.

A purely relative margin would be set by small jobs, for which 100 MiB is much, and be too wide for large ones.
"""
_SEGMENT_BYTES = 20 * MIB
"""Size of a segment that the allocator takes from the device."""
_LEAST_SCALE = 0.002
"""Smallest scale of a density of scores: half a percent between its quartiles."""
_FIRST_LAYERS = 3
"""Convolutions that a Transformer may begin with."""
_MEASURED_LIBRARIES = ("timm",)
"""Libraries with measured rows; bounds for networks of other libraries are wider."""
_REAL_ELSEWHERE = "real elsewhere"


def stratum(example: Example) -> str:
    """Return the stratum of a job: a generated family, or for real networks how cuDNN can treat them."""
    if example.family in FAMILIES:
        return example.family
    if not _has_workspaces(example):
        return "real" if example.family in _MEASURED_LIBRARIES else _REAL_ELSEWHERE
    return "real with trials" if example.training.cudnn_benchmark else "real with workspaces"


def calibrated_strata(example: Example) -> tuple[str, ...]:
    """Return the strata that a measured job calibrates: its own, the one without trials, and other libraries."""
    if example.measured.trial or example.family in FAMILIES:
        return (stratum(example),)
    alike = replace(example, training=replace(example.training, cudnn_benchmark=False))
    return tuple(dict.fromkeys((stratum(example), stratum(alike), _REAL_ELSEWHERE)))


def _has_workspaces(example: Example) -> bool:
    """Return whether the network is convolutional; a first layer that cuts an image into patches does not count."""
    return example.columns.convolution_count > _FIRST_LAYERS


def calibrated_errors(examples: Sequence[Example], estimated_bytes: Array) -> CalibratedErrors:
    """Return the errors of estimates of the allocators' memory; one counts in all strata that its job calibrates."""
    scores = score(own_bytes_of(examples), estimated_bytes).tolist()
    pairs = [
        (name, item) for example, item in zip(examples, scores, strict=True) for name in calibrated_strata(example)
    ]
    return with_everything(CalibratedErrors.fit(pairs).scores)


def with_everything(scores: Mapping[str, Array]) -> CalibratedErrors:
    """Return scores by stratum with those of all rows, which bound jobs of small strata."""
    return CalibratedErrors({**scores, EVERYTHING: np.sort(np.concatenate(list(scores.values())))})


def score(own_bytes: ArrayLike, estimated_bytes: ArrayLike) -> Array:
    """Return [n]: the scores of needs with these estimates."""
    return np.asarray(np.log(_steady(own_bytes)) - np.log(_steady(estimated_bytes)))


def unit_bytes(estimated_bytes: Array) -> Array:
    """Return [n]: the unit of errors; 1 for an estimate of infinity, of a job that fits no device."""
    return np.where(np.isfinite(estimated_bytes), _steady(estimated_bytes), 1.0)


def in_units(scores: Array) -> Array:
    """Convert scores to units: a need with this score exceeds its estimate by so many."""
    return np.expm1(scores)


def relative_scales(errors: CalibratedErrors, examples: Sequence[Example], estimated_bytes: Array) -> Array:
    """Return [n]: the scale of a logistic over the logarithm of memory with the quartiles of each stratum's scores.

    It is greater for small jobs. Estimates are clamped to one segment, because the logarithm diverges below it.
    """
    names = [name if (name := stratum(example)) in errors.scores else EVERYTHING for example in examples]
    scale_of = {name: _scale(errors.scores[name]) for name in set(names)}
    scales = np.array([scale_of[name] for name in names], dtype=np.float64)
    estimated = np.maximum(estimated_bytes, _SEGMENT_BYTES)
    return np.asarray(np.log((_steady(estimated) * np.exp(scales) - _STEADY_BYTES) / estimated))


def _scale(scores: Array) -> float:
    """Return the scale; the quartiles of a standard logistic are log 3 from its middle."""
    low, high = np.quantile(scores, [0.25, 0.75])
    return max(float(high - low) / (2 * math.log(3)), _LEAST_SCALE)


def _steady(own_bytes: ArrayLike) -> Array:
    return np.asarray(own_bytes, dtype=np.float64) + _STEADY_BYTES
