"""Changes to a list of workspace rules that a search tries, and the difference of two profiles in words."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from vramcast.device.calibration.amounts import Amount
from vramcast.device.calibration.probes import DIRECTIONS
from vramcast.virtual_gpu.canonical import without_defaults
from vramcast.virtual_gpu.profile import CONDITIONS, ConvolutionWorkspace, DeviceProfile, features_of
from vramcast.virtual_gpu.tracing.trace import ConvolutionCall

Rules = tuple[ConvolutionWorkspace, ...]
_QUANTILES = 8
_LIMITED = ("max_channels", "min_channels", "max_input_channels", "max_output_channels", "max_size")
_FLAGS = ("pointwise", "grouped", "aligned")


def moves(profile: DeviceProfile, calls: Sequence[ConvolutionCall], amounts: Sequence[Amount]) -> list[Rules]:
    """Return all rule lists with another amount for one rule, or with a new rule before the others."""
    rules = profile.convolution
    changed = [
        (*rules[:index], replace(_bare(rule), **amount.fields), *rules[index + 1 :])
        for index, rule in enumerate(rules)
        for amount in amounts
    ]
    conditions = _separating(calls, profile.align_channels)
    added = [(ConvolutionWorkspace(**met, **amount.fields), *rules) for met in conditions for amount in amounts]
    return [item for item in (*changed, *added) if item != rules]


def _bare(rule: ConvolutionWorkspace) -> ConvolutionWorkspace:
    return replace(rule, copies=0.0, output_copies=None, weight_copies=None, extra_mib=0)


def _separating(calls: Sequence[ConvolutionCall], align: int) -> Iterator[dict[str, Any]]:
    """Yield conditions, alone and for each direction, that some of the calls meet and others do not."""
    features = [features_of(call, align) for call in calls]
    single: list[dict[str, Any]] = [{}]
    for name in _LIMITED:
        values = sorted({item[CONDITIONS[name][0]] for item in features})
        single += [{name: value} for value in values[: -1 : max(1, len(values) // _QUANTILES)]]
    single += [{name: True} for name in _FLAGS if len({item[name] for item in features}) > 1]
    for conditions in single:
        if conditions:
            yield conditions
        yield from ({"direction": direction, **conditions} for direction in DIRECTIONS)


def changes(old: DeviceProfile, new: DeviceProfile) -> Iterator[str]:
    """Yield a phrase for each constant and rule that differs."""
    for name in ("context_mib", "cudnn_mib", "batch_norm_mib", "align_channels"):
        if getattr(old, name) != getattr(new, name):
            yield f"{name} {getattr(old, name)} -> {getattr(new, name)}"
    for rule in new.convolution:
        if rule not in old.convolution:
            yield f"{rule.label}: {_amount(rule)}"


def _amount(rule: ConvolutionWorkspace) -> str:
    amounts = {key: value for key, value in without_defaults(rule).items() if key not in CONDITIONS}
    return ", ".join(f"{key} {value:g}" for key, value in amounts.items())
