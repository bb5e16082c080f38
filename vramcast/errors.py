"""What cannot be carried out: mostly what a user asked for."""

import math
from collections.abc import Collection
from typing import Any


class UserError(ValueError):
    """Bad input. The message is one sentence: what was expected, what was found, how to mend it."""


class UntraceableError(UserError):
    """Of one network: it cannot run without data. Others may."""


class WorkerError(RuntimeError):
    """Workers cannot work at all, whatever the spec: the run is over."""


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Refuse anything but a whole number from `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"expected {name} to be a whole number from {least}, found {value!r}: change it")


def check_flag(name: str, value: Any) -> None:
    """Refuse anything but true and false: 1 would be another spec than true."""
    if not isinstance(value, bool):
        raise UserError(f"expected {name} to be true or false, found {value!r}: change it")


def check_choice(name: str, value: Any, choices: Collection[Any]) -> None:
    """Refuse a value that is not among the choices."""
    if value not in list(choices):  # a list compares, where a mapping would hash
        raise UserError(f"expected {name} to be one of {list(choices)}, found {value!r}: change it")


def check_amount(name: str, value: Any, zero: bool = True) -> None:
    """Refuse anything but a finite number from zero, or above it: NaN would pass for less than any bound."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and not zero):
        raise UserError(f"expected {name} to be a number {'from' if zero else 'above'} 0, found {value!r}: change it")


def check_probability(name: str, value: Any) -> None:
    """Refuse anything but a number from 0 up to, and not including, 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise UserError(f"expected {name} to be a number from 0 to below 1, found {value!r}: change it")
