"""Figures of JSON, rounded to what they mean: no estimate of memory is known to more than a tenth of a MiB."""

from collections.abc import Mapping
from typing import Any

_MIB_DIGITS = 1
_SECONDS_DIGITS = 2
_SIGNIFICANT = 4
"""Of probabilities and shares, which may be small."""
_SHARES = ("probability", "share", "fragmentation", "growth")


def rounded(value: Any, name: str = "") -> Any:
    """Return a value of JSON with its floats rounded by their keys; what has no unit in its key stays as it is.

    The keys of a mapping whose own key ends in `_mib` are names of parts, such as those of the breakdown.
    """
    if isinstance(value, Mapping):
        inherited = name if name.endswith("_mib") else ""
        return {key: rounded(item, inherited or str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item, name) for item in value]
    return _rounded_float(value, name) if isinstance(value, float) else value


def _rounded_float(value: float, name: str) -> float:
    if name == "mib" or name.endswith("_mib"):
        return round(value, _MIB_DIGITS)
    if name.endswith("seconds"):
        return round(value, _SECONDS_DIGITS)
    return float(f"{value:.{_SIGNIFICANT}g}") if name.endswith(_SHARES) else value
