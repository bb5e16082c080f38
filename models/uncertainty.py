"""What is uncertain in a job: the strata that it is calibrated in, and the unit of its errors.

Both follow from the job and its simulation alone, never from a measurement.
"""

import math

from vramcast.dataset_builder.families import FAMILIES
from vramcast.models.example import Example
from vramcast.models.features.layers import convolutions_of
from vramcast.virtual_gpu.sizes import MIB
from vramcast.virtual_gpu.training_setup import DTYPE_BYTES

EVERYTHING = "all"
_EXACT, _WORKSPACES = "exact", "workspaces"
_PROCESS_BYTES = 512 * MIB
"""The unit of what other processes hold."""
_STEADY_BYTES, _GUESSED_BYTES = 128 * MIB, 64 * MIB
"""Added to a job's memory and to what is guessed in it: errors of every job, such as a few segments of the allocator
more or less. Without them, small jobs would set the margin of all."""
_FEW = 0.01
"""Share of a job's memory below which its largest convolution does not count, such as one that cuts image patches."""
_MISALIGNED = 0.02
"""Share of convolutions with channels that are no multiple of four, from which cuDNN chooses less regularly."""
_LARGE_BYTES = 6 * MIB
"""Input and output of the largest convolution for one sample, from which trials of cuDNN take gigabytes more often."""
_ASSUMED_SHARE = 0.25
"""Share of a job's memory that an assumption about its data may decide."""
_ALIGNMENT = 4


def strata(example: Example) -> tuple[str, ...]:
    """Return the strata of a job, the narrowest first; the last one has all undisturbed rows.

    A stack that was measured has strata of its own, because it may hold other processes.
    """
    kind = _kind(example)
    return (*_stack_strata(example, kind), *_trial_strata(example, kind), *_clean_strata(example, kind))


def calibrated_strata(example: Example, disturbed: bool) -> tuple[str, ...]:
    """Return the strata that a measured job calibrates.

    A disturbed job calibrates those of its stack; one with a trial of cuDNN also other jobs that try. An undisturbed
    job calibrates jobs without trials too.
    """
    if not disturbed:
        return strata(example)
    kind = _kind(example)
    return (*_stack_strata(example, kind), *(_trial_strata(example, kind) if example.measured.trial else ()))


def _stack_strata(example: Example, kind: str) -> tuple[str, ...]:
    family = f"{example.source}/{example.family}"
    trials = _trial_strata(example, kind)
    return (*(f"{family}/{name}" for name in trials[:1]), f"{family}/{kind}", family)


def _trial_strata(example: Example, kind: str) -> tuple[str, ...]:
    """Return the strata of jobs in which cuDNN tries workspaces: networks with convolutions and cudnn.benchmark."""
    if not example.training.cudnn_benchmark or not kind.startswith(_WORKSPACES):
        return ()
    large = convolution_bytes(example) >= _LARGE_BYTES * example.training.batch_size
    return (f"trials, {'large' if large else 'small'} convolutions", "trials")


def _clean_strata(example: Example, kind: str) -> tuple[str, ...]:
    origin = "generated" if example.family in FAMILIES else "real"
    names = (*(f"{kind}, {doubt}" for doubt in _doubts(example)), kind, kind.split(", ", maxsplit=1)[0])
    return (*dict.fromkeys(f"{origin}, {name}" for name in names), EVERYTHING)


def _doubts(example: Example) -> list[str]:
    """Return what makes a job less certain than others of its kind: it has a stratum of its own if rows have it too."""
    doubts = {
        "ranks": example.training.parallel is not None,
        "uncalibrated device": not example.calibrated,
        "assumed values": example.assumed,
    }
    return [name for name, holds in doubts.items() if holds]


def _kind(example: Example) -> str:
    """Return what the error of a job depends on most: nothing, or workspaces that a rule guesses."""
    if convolution_bytes(example) <= _FEW * _own_bytes(example):
        return _EXACT
    channels = [item.channels for item in convolutions_of(example) if item.total]
    misaligned = sum(number % _ALIGNMENT != 0 for number in channels) > _MISALIGNED * len(channels)
    return f"{_WORKSPACES}, {'misaligned' if misaligned else 'aligned'}"


def unit_bytes(example: Example, stratum: str) -> float:
    """Return the unit in which a job's errors are counted: the geometric mean of its memory and what is guessed in it.

    Errors grow with a job, but more slowly, and with the convolutions whose workspaces a rule guesses. On a measured
    stack, the unit of an exact job is a constant: most of its errors are other processes, whatever the job's size.
    """
    own = _own_bytes(example)
    kind = _kind(example)
    if kind == _EXACT and stratum in _stack_strata(example, kind):
        return float(_PROCESS_BYTES)
    guessed: float = _GUESSED_BYTES + convolution_bytes(example)
    if not example.calibrated:
        guessed += convolution_bytes(example) + example.overhead_bytes / 4
    if example.assumed:
        guessed += _ASSUMED_SHARE * own
    return math.sqrt((own + _STEADY_BYTES) * guessed)


def convolution_bytes(example: Example) -> int:
    """Return input, output and weight of the largest convolution: a workspace rule is wrong by copies of them."""
    largest = max((item.total for item in convolutions_of(example)), default=0)
    return largest * DTYPE_BYTES[example.training.dtype]


def _own_bytes(example: Example) -> int:
    """Return the simulated memory of the job's allocator, or the static estimate of a layer table."""
    return (example.simulated.reserved_bytes or 0) if example.simulated else example.static.total_bytes
