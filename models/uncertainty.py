"""Uncertainty of a job: the strata that it is calibrated in, and the unit of its errors.

Both follow from the job and its simulation alone, never from a measurement.
"""

from vramcast.jobs.families import FAMILIES
from vramcast.models.calibration import EVERYTHING
from vramcast.models.example import Example
from vramcast.models.features.layers import largest_convolution
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.training.setup import DTYPE_BYTES

_EXACT, _WORKSPACES = "exact", "workspaces"
_PROCESS_BYTES = 512 * MIB
"""The unit of what other processes hold."""
_STEADY_BYTES, _GUESSED_BYTES = 128 * MIB, 64 * MIB
"""Added to a job's memory and to what is guessed in it: errors of every job, such as a few segments of the allocator
more or less. Without them, small jobs would set the margin of all."""
_GUESSED_WORKSPACES_BYTES = 256 * MIB
"""The guess in a job with convolutions: a workspace that a rule guesses wrongly changes which blocks are split."""
_MEMORY_POWER, _MEMORY_POWER_IF_EXACT = 0.4, 0.5
"""The power of a job's memory in its unit: what is guessed has the rest. Errors of workspaces grow more slowly with a
job than other ones."""
_FEW = 0.01
"""Share of a job's memory below which its largest convolution does not count, such as one that cuts image patches."""
_MISALIGNED = 0.02
"""Share of convolutions with channels that are no multiple of four, from which cuDNN chooses less regularly."""
_FEW_TRIED_BYTES, _MANY_TRIED_BYTES = 10 * 2**30, 50 * 2**30
"""Sums of the workspaces that cuDNN tries. No measured row shows a trial below the first, and a fifth do above the
second."""
_STEADY_TRIAL_SHARE = 0.25
"""The part of a job's other errors in the unit of one with trials."""
_LEAST_SCALE = 0.01
"""Added to the usual relative error, which is 0 for many jobs."""
_ASSUMED_SHARE, _ASSUMED_SHARE_IF_EXACT = 0.25, 1.0
"""Share of a job's memory that an assumption about its data may decide, and the one if the job is exact otherwise. The
errors of exact jobs are small in their unit, so that an assumption needs a larger one for the same margin."""
_COMPILED_SHARE = 0.25
"""Share of a job's memory that the rule for fused code may decide: a choice, as no compiled job was measured here."""
_NCCL_BYTES = 2**30
"""The guess in a rank on a device without a measured memory of NCCL."""
_ALIGNMENT = 4


def strata(example: Example) -> tuple[str, ...]:
    """Return the strata of a job, the narrowest first; the last one has all undisturbed rows.

    A stack that was measured has strata of its own, because it may hold other processes.
    """
    kind = _kind(example)
    return (*_stack_strata(example, kind), *_trial_strata(example), *_clean_strata(example, kind))


def calibrated_strata(example: Example, disturbed: bool) -> tuple[str, ...]:
    """Return the strata that a measured job calibrates.

    A disturbed job calibrates those of its stack, and a job with trials those of its stack and other jobs with trials.
    """
    kind = _kind(example)
    own, trials = _stack_strata(example, kind), _trial_strata(example)
    if disturbed:
        return own
    return (*own, *(trials or _clean_strata(example, kind)))


def _stack_strata(example: Example, kind: str) -> tuple[str, ...]:
    family = f"{example.source}/{example.family}"
    return tuple(f"{family}/{name}" for name in _trial_strata(example)) or (f"{family}/{kind}", family)


def _trial_strata(example: Example) -> tuple[str, ...]:
    """Return the stratum of a job in which a monitor may see a trial of cudnn.benchmark."""
    tried = example.simulated.tried_bytes or 0 if example.simulated else 0
    if tried < _FEW_TRIED_BYTES:
        return ()
    return ("many trials" if tried >= _MANY_TRIED_BYTES else "some trials",)


def may_show_trials(example: Example) -> bool:
    """Return whether cuDNN tries so much that a monitor may see it, so that the bound of a job includes it."""
    return bool(_trial_strata(example))


def _clean_strata(example: Example, kind: str) -> tuple[str, ...]:
    origin = "generated" if has_learned_scale(example) or (kind == _EXACT and example.family in FAMILIES) else "real"
    names = (*(f"{kind}, {doubt}" for doubt in _doubts(example)), kind, kind.split(", ", maxsplit=1)[0])
    return (*dict.fromkeys(f"{origin}, {name}" for name in names), EVERYTHING)


def _doubts(example: Example) -> list[str]:
    """Return the doubts about a job beyond those of its kind: it has a stratum of its own if rows have them too."""
    doubts = {
        "ranks": example.is_rank,
        "uncalibrated device": not example.calibrated,
        "assumed values": example.assumed,
        "compiled code": example.compiled,
        "inference": example.is_inference,
    }
    return [name for name, holds in doubts.items() if holds]


def _kind(example: Example) -> str:
    """Return the main cause of a job's error: none, or workspaces that a rule guesses.

    Those whose channels are no multiples of four are a kind of their own, unless the error of a job is learned.
    """
    if _is_exact(example):
        return _EXACT
    if has_learned_scale(example):
        return _WORKSPACES
    channels = example.columns.convolutions(example.input_elements).channels
    misaligned = (channels % _ALIGNMENT != 0).sum() > _MISALIGNED * len(channels)
    return f"{_WORKSPACES}, {'misaligned' if misaligned else 'aligned'}"


def unit_bytes(example: Example, stratum: str, scale: float) -> float:
    """Return the unit in which a job's errors are counted.

    With trials, it is the memory of the largest one beyond the job's own. For a generated network with convolutions, it
    is the usual error of such jobs (`scale`, relative to their memory). On a measured stack, it is a constant for an
    exact job: most of its errors are other processes. Otherwise it is a weighted geometric mean of the job's memory and
    what is guessed in it, because errors grow with a job, but more slowly.
    """
    own = _own_bytes(example)
    kind = _kind(example)
    if stratum.endswith("trials"):
        trial_bytes = (example.simulation.trial_bytes or 0) - (example.simulation.reserved_bytes or 0)
        return _STEADY_TRIAL_SHARE * _guess_bytes(example, own) + max(trial_bytes, 0)
    if kind == _EXACT and stratum in _stack_strata(example, kind):
        return float(_PROCESS_BYTES)
    if has_learned_scale(example):
        return (scale + _LEAST_SCALE) * own + _GUESSED_BYTES / 2
    return _guess_bytes(example, own)


def has_learned_scale(example: Example) -> bool:
    """Return whether the unit of a job is learned: generated networks with convolutions have enough measured rows.

    On a device that was not measured, what is learned of another one does not hold: the job counts as a real network.
    """
    return example.family in FAMILIES and example.calibrated and not _is_exact(example)


def _is_exact(example: Example) -> bool:
    return convolution_bytes(example) <= _FEW * _own_bytes(example)


def _guess_bytes(example: Example, own: int) -> float:
    exact = _is_exact(example)
    guessed: float = _GUESSED_BYTES + convolution_bytes(example) if exact else _GUESSED_WORKSPACES_BYTES
    if not example.calibrated:
        guessed += convolution_bytes(example) + example.overhead_bytes
    if example.unknown_nccl:
        guessed += _NCCL_BYTES
    if example.assumed or example.is_inference:
        guessed += (_ASSUMED_SHARE_IF_EXACT if exact else _ASSUMED_SHARE) * own
    if example.compiled:
        guessed += _COMPILED_SHARE * own
    power = _MEMORY_POWER_IF_EXACT if exact else _MEMORY_POWER
    return float((own + _STEADY_BYTES) ** power * guessed ** (1 - power))


def convolution_bytes(example: Example) -> int:
    """Return input, output and weight of the largest convolution: a workspace rule is wrong by copies of them."""
    return largest_convolution(example) * DTYPE_BYTES[example.training.dtype]


def _own_bytes(example: Example) -> int:
    """Return the simulated memory of the allocator or the static estimate of a layer table, up to the capacity."""
    own = (example.simulated.reserved_bytes or 0) if example.simulated else example.static.total_bytes
    return min(own, example.capacity_bytes)
