"""Labels as intervals of the gap, which the likelihood of a density is computed from."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vramcast.errors import UserError
from vramcast.models.estimators.batch import GapLabels
from vramcast.models.example import Example
from vramcast.models.features import FeatureSet
from vramcast.virtual_gpu.allocator.sizes import MIB

Array = NDArray[np.float64]

_PRECISION = 0.0025
"""Half the relative width of the interval around a measurement: runs of one job differ by about as much."""
PARTS = ("parameters", "gradients", "optimizer_state", "activations", "temporaries", "workspace", "allocator_cache")
"""Parts of a simulated peak that a network also learns."""
_STEADY_BYTES = 16 * MIB
_LEAST_BYTES = MIB
"""Half the smallest width: nvidia-smi reports whole MiB. Also the smallest use of a job."""


def intervals(examples: Sequence[Example]) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Return lower and upper bounds in bytes, and which jobs fit; the lower bound of others is the capacity."""
    labels = [example.measured for example in examples]
    fits = np.array([label.fits for label in labels])
    overhead = np.array([example.overhead_bytes for example in examples], dtype=np.float64)
    used = np.maximum(np.array([label.used_bytes for label in labels], dtype=np.float64), overhead + _LEAST_BYTES)
    capacity = np.array([example.capacity_bytes for example in examples], dtype=np.float64)
    half = np.maximum(_LEAST_BYTES, _PRECISION * used)
    lower = np.where(fits, np.maximum(used - half, overhead + _LEAST_BYTES / 2), capacity)
    return lower, np.where(fits, used + half, capacity + half), fits


def gap_labels(examples: Sequence[Example], features: FeatureSet, bucket_mib: int) -> GapLabels:
    """Return the intervals as gaps, and the bucket of that width around each."""
    lower, upper, fits = intervals(examples)
    middle, width = (lower + upper) / 2, float(bucket_mib * MIB)
    floor = np.floor(middle / width) * width
    gaps = [gaps_of(bytes_, examples, features) for bytes_ in (lower, upper, floor, floor + width)]
    bucket_lower = np.where(fits, gaps[2], gaps[0])  # the bucket of a job that did not fit begins at the capacity
    parts = part_gaps(examples, features)
    tensors = [torch.from_numpy(item).float() for item in (gaps[0], gaps[1], bucket_lower, gaps[3], parts)]
    return GapLabels(torch.from_numpy(fits), *tensors)


def part_gaps(examples: Sequence[Example], features: FeatureSet) -> Array:
    """Return [n, PARTS]: logarithms of the parts at the peak over the reference, nan where a label has none.

    A steady amount is added to both, so that an empty part is a finite number.
    """
    rows = np.full((len(examples), len(PARTS)), np.nan)
    for row, example in zip(rows, examples, strict=True):
        label = example.measured
        if label.parts is not None and label.fits:
            parts = np.array([label.parts.get(name, 0) for name in PARTS], dtype=np.float64)
            row[:] = np.log((parts + _STEADY_BYTES) / (features.reference_bytes(example) + _STEADY_BYTES))
    return rows


def gaps_of(used_bytes: Array, examples: Sequence[Example], features: FeatureSet) -> Array:
    """Return [n]: log((used - overhead) / reference)."""
    overhead = np.array([example.overhead_bytes for example in examples], dtype=np.float64)
    reference = np.array([features.reference_bytes(example) for example in examples], dtype=np.float64)
    return np.asarray(np.log(np.maximum(used_bytes - overhead, 1) / np.maximum(reference, 1)))


def center_and_spread(labels: GapLabels) -> tuple[float, float]:
    """Return the median of the gaps of jobs that fit, and their interquartile range as a standard deviation."""
    gaps: Tensor = ((labels.lower + labels.upper) / 2)[labels.fits]
    if not len(gaps):
        raise UserError("expected some training examples that fit their device, found none: add some")
    low, median, high = torch.quantile(gaps.double(), torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
    return median, max((high - low) / 1.349, _LEAST_SPREAD)


_LEAST_SPREAD = 0.01
