"""Device profiles by name, read straight from `conf/device`: an answer is not to wait for Hydra."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataset_builder.errors import UserError

if TYPE_CHECKING:
    from dataset_builder.measure.virtual.profile import DeviceProfile

CONF = Path(__file__).resolve().parent.parent / "conf"
DEFAULT_DEVICE = "a100_40gb"


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
    from dataset_builder.measure.virtual.profile import parse_profile  # noqa: PLC0415 - torch, which names need not

    return parse_profile(load_device(name))


def known_cards() -> list["DeviceProfile"]:
    """A profile for each card, smallest first; stacks of a set of measurements, told by a comma, are left out."""
    profiles = [load_profile(name) for name in device_names()]
    return sorted((item for item in profiles if "," not in item.title), key=lambda item: (item.total_mib, item.name))
