"""Device profiles by name, read straight from `conf/device`: an answer is not to wait for Hydra."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramcast.errors import UserError

if TYPE_CHECKING:
    from vramcast.virtual_gpu.profile import DeviceProfile

CONF = Path(__file__).resolve().parent.parent / "conf"
DEFAULT_DEVICE = "a100_40gb"
_OTHER_CARD = {"ti", "super", "laptop", "mobile", "mig", "d"}
"""Words that make another card of one with the same number."""


def device_names() -> list[str]:
    """All profiles that there are."""
    return sorted(path.stem for path in (CONF / "device").glob("*.yaml"))


def load_device(name: str) -> dict[str, Any]:
    """The settings of a profile as its file in `conf/device` has them."""
    import yaml  # noqa: PLC0415 - the only one who needs it

    if name not in device_names():
        raise UserError(f"expected device to be one of {device_names()}, found {name!r}: choose one")
    with (CONF / "device" / f"{name}.yaml").open(encoding="utf-8") as file:
        try:
            settings = yaml.safe_load(file)
        except yaml.YAMLError as error:
            raise UserError(f"expected YAML in {file.name}, found: {error}: mend it") from error
    if not isinstance(settings, dict):
        raise UserError(f"expected the settings of a device in {file.name}, found {settings!r}: mend it")
    return settings


@cache
def load_profile(name: str) -> "DeviceProfile":
    """The profile of that name."""
    from vramcast.virtual_gpu.profile import parse_profile  # noqa: PLC0415 - torch, which names need not

    return parse_profile(load_device(name))


def device_of_card(card: str) -> str | None:
    """The profile whose title has only words of a card's name, and most of them: 'NVIDIA A100-SXM4-40GB' is a100_40gb.

    Profiles of a set of measurements, which say more after a comma, are not meant.
    """
    words = _words(card)
    titles = {name: str(load_device(name)["title"]) for name in device_names()}
    named = {name: _words(title) for name, title in titles.items() if "," not in title}
    fitting = {name: title for name, title in named.items() if title <= words and not (words - title) & _OTHER_CARD}
    return max(fitting, key=lambda name: len(fitting[name]), default=None)


def device_for(card: str | None, note: Callable[[str], None]) -> str:
    """The profile of a card; without any, the first card of which profiles were calibrated stands in."""
    found = device_of_card(card or "")
    if found is None:
        note(
            f"no device profile for the card {card}: {DEFAULT_DEVICE} stands in, whose context is another: "
            "name a nearer one with --device"
        )
    return found or DEFAULT_DEVICE


def _words(text: str) -> set[str]:
    """The words and numbers of a card's name; the maker's name tells no cards apart."""
    return set(re.findall(r"\d*[a-z]+\d+[a-z]*|\d+|[a-z]+", text.lower())) - {"nvidia", "gb"}


def known_cards() -> list["DeviceProfile"]:
    """A profile for each card, smallest first; stacks of a set of measurements, told by a comma, are left out."""
    profiles = [load_profile(name) for name in device_names()]
    return sorted((item for item in profiles if "," not in item.title), key=lambda item: (item.total_mib, item.name))
