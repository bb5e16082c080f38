"""Measured memory as intervals of the gap, which is what a density is held to."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vramcast.errors import UserError
from vramcast.models.batch import Targets
from vramcast.models.example import Example
from vramcast.models.features import FeatureSet
from vramcast.virtual_gpu.sizes import MIB

Array = NDArray[np.float64]

_PRECISION = 0.0025
"""Half the width of the interval that counts as hit, as a share: runs of one job differ by about as much."""
_LEAST_BYTES = MIB
"""Half the least width: nvidia-smi tells whole MiB. Also the least that a job is taken to use."""


def intervals(examples: Sequence[Example]) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Lower and upper bounds in bytes on the device, and what fitted; of what did not, the lower bound is the card."""
    targets = [example.measured for example in examples]
    fits = np.array([target.fits for target in targets])
    overhead = np.array([example.overhead_bytes for example in examples], dtype=np.float64)
    used = np.maximum(np.array([target.used_bytes for target in targets], dtype=np.float64), overhead + _LEAST_BYTES)
    capacity = np.array([example.capacity_bytes for example in examples], dtype=np.float64)
    half = np.maximum(_LEAST_BYTES, _PRECISION * used)
    lower = np.where(fits, np.maximum(used - half, overhead + _LEAST_BYTES / 2), capacity)
    return lower, np.where(fits, used + half, capacity + half), fits


def gap_targets(examples: Sequence[Example], features: FeatureSet, bucket_mib: int) -> Targets:
    """The intervals as gaps, and the bucket of that width around each."""
    lower, upper, fits = intervals(examples)
    middle, width = (lower + upper) / 2, float(bucket_mib * MIB)
    floor = np.floor(middle / width) * width
    gaps = [gaps_of(bytes_, examples, features) for bytes_ in (lower, upper, floor, floor + width)]
    bucket_lower = np.where(fits, gaps[2], gaps[0])  # of a job that did not fit, the bucket begins at the card's limit
    tensors = [torch.from_numpy(item).float() for item in (gaps[0], gaps[1], bucket_lower, gaps[3])]
    return Targets(torch.from_numpy(fits), *tensors)


def gaps_of(used_bytes: Array, examples: Sequence[Example], features: FeatureSet) -> Array:
    """[n]: log((used - overhead) / reference)."""
    overhead = np.array([example.overhead_bytes for example in examples], dtype=np.float64)
    reference = np.array([features.reference_bytes(example) for example in examples], dtype=np.float64)
    return np.asarray(np.log(np.maximum(used_bytes - overhead, 1) / np.maximum(reference, 1)))


def center_and_spread(targets: Targets) -> tuple[float, float]:
    """Where the gaps lie that are known, robustly: median, and the quartiles' distance as a standard deviation."""
    gaps: Tensor = ((targets.lower + targets.upper) / 2)[targets.fits]
    if not len(gaps):
        raise UserError("expected some training examples that fit their card, found none: add some")
    low, median, high = torch.quantile(gaps.double(), torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
    return median, max((high - low) / 1.349, _LEAST_SPREAD)


_LEAST_SPREAD = 0.01
