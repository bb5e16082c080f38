"""Errors that a user can act on, and checks that raise them."""

import difflib
import math
import re
from collections.abc import Collection, Iterable
from typing import Any

_MOST_SUGGESTIONS = 5


class UserError(ValueError):
    """Bad input. The message is one sentence: what was expected, what was found, how to fix it."""


class UntraceableError(UserError):
    """One network cannot run without data; others may."""


class WorkerError(RuntimeError):
    """Workers cannot measure any spec, so the run ends."""


def nearest_names(name: str, names: Iterable[str]) -> list[str]:
    """Return the names that a user may have meant: the same one in another spelling, longer ones, or similar ones."""
    plain = {item: _plain(item) for item in names}
    wanted = _plain(name)
    same = [item for item, text in plain.items() if text == wanted]
    if same or not wanted:
        return same
    if longer := [item for item, text in plain.items() if text.startswith(wanted)]:
        return _shortest(longer)
    similar = difflib.get_close_matches(wanted, plain.values(), n=3)
    if similar:  # before names that contain it: mpl is rather mlp than template
        return [item for text in dict.fromkeys(similar) for item in plain if plain[item] == text][:_MOST_SUGGESTIONS]
    return _shortest([item for item, text in plain.items() if wanted in text])


def _shortest(names: Collection[str]) -> list[str]:
    """Return the shortest names; a100_40gb stands for a100_40gb_timm_2024, too."""
    heads = [item for item in names if not any(item.startswith(f"{other}_") for other in names)]
    return sorted(heads, key=lambda item: (len(item), item))[:_MOST_SUGGESTIONS]


def _plain(text: str) -> str:
    """Return a name without case and separators."""
    return re.sub(r"[\s_.-]+", "", text.lower())


def suggestion(name: Any, names: Iterable[Any], otherwise: str = "choose one") -> str:
    """Return the end of an error about a wrong name: 'did you mean a or b?', or `otherwise`."""
    near = nearest_names(name, (item for item in names if isinstance(item, str))) if isinstance(name, str) else []
    if not near:
        return otherwise
    *first, last = near
    return f"did you mean {', '.join(first)} or {last}?" if first else f"did you mean {last}?"


def check_choice(name: str, value: Any, choices: Collection[Any]) -> None:
    """Raise UserError unless the value is among the choices."""
    options = list(choices)  # a list compares, where a mapping would hash
    if value not in options:
        raise UserError(f"expected {name} to be one of {options}, found {value!r}: {suggestion(value, options)}")


def check_count(name: str, value: Any, least: int = 1, most: int | None = None) -> None:
    """Raise UserError unless the value is an integer of at least `least`, and at most `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"expected {name} to be a whole number from {least}, found {value!r}: change it")
    if most is not None and value > most:
        raise UserError(f"expected {name} to be at most {most}, found {value}: make it smaller")


def check_flag(name: str, value: Any) -> None:
    """Raise UserError unless the value is a bool: 1 would hash to another spec than True."""
    if not isinstance(value, bool):
        raise UserError(f"expected {name} to be true or false, found {value!r}: change it")


def check_fraction(name: str, value: Any) -> None:
    """Raise UserError unless the value is a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise UserError(f"expected {name} to be a number from 0 to 1, found {value!r}: change it")


def check_amount(name: str, value: Any, zero: bool = True) -> None:
    """Raise UserError unless the value is finite and at least 0 (above 0 if `zero` is false); NaN passes `<`."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and not zero):
        raise UserError(f"expected {name} to be a number {'from' if zero else 'above'} 0, found {value!r}: change it")


def check_probability(name: str, value: Any) -> None:
    """Raise UserError unless the value is a number in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise UserError(f"expected {name} to be a number from 0 to below 1, found {value!r}: change it")
