"""Device profiles by name: those in `conf/device`, and those in the user's own configuration directory.

They are read without Hydra, which takes half a second to import.
"""

import os
import re
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramcast.errors import UserError, check_choice
from vramcast.files.yaml_text import parse_yaml

if TYPE_CHECKING:
    from vramcast.virtual_gpu.profile import DeviceProfile

CONF = Path(__file__).resolve().parent.parent / "conf"
DEFAULT_DEVICE = "a100_40gb"
RULE_FIELDS = ("convolution", "padded_depthwise_channels", "padded_strided_channels")
"""Fields of a profile that come from its rule set."""
_OTHER_GPU = {"ti", "super", "laptop", "mobile", "mig", "d"}
"""Words that tell two GPUs with the same number apart."""


def user_conf() -> Path:
    """Return the directory of the user's own configuration, which is laid out like `conf`."""
    if own := os.environ.get("VRAMCAST_CONFIG"):
        return Path(own)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "vramcast"


def _files(group: str) -> dict[str, Path]:
    """Return the files of a configuration group by name; a shipped file hides one of the user's."""
    folders = (user_conf() / group, CONF / group)
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def device_names() -> list[str]:
    """Return the names of all profiles."""
    return sorted(_files("device"))


def device_file(name: str) -> Path:
    """Return the file that a profile comes from."""
    files = _files("device")
    check_choice("device", name, sorted(files))
    return files[name]


def is_shipped(name: str) -> bool:
    """Return True for a profile of `conf/device`, False for one of the user's own."""
    return (CONF / "device" / f"{name}.yaml").exists()


def read_device(name: str) -> dict[str, Any]:
    """Return the settings in the file of a profile, with the name of its rule set."""
    path = device_file(name)
    settings = _read_yaml(path, "the settings of a device")
    if settings.get("name") != name:
        raise UserError(f"expected the name {name} in {path}, found {settings.get('name')!r}: rename one of them")
    return settings


def load_device(name: str) -> dict[str, Any]:
    """Return the settings of a profile with its workspace rules."""
    return with_rules(read_device(name))


def read_rules(name: str) -> dict[str, Any]:
    """Return a rule set: its `evidence`, its rules as `convolution`, and other fields of `RULE_FIELDS`."""
    files = _files("device/rules")
    check_choice("rules", name, sorted(files))
    rules = _read_yaml(files[name], "a rule set")
    unknown = sorted(map(str, set(rules) - {"evidence", *RULE_FIELDS}))
    if unknown:
        raise UserError(f"expected evidence, {', '.join(RULE_FIELDS)} in {files[name]}, found {unknown[0]}: remove it")
    return rules


def with_rules(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a profile with the rules in place of the name of their set."""
    resolved = dict(settings)
    if (name := resolved.pop("rules", None)) is None:
        return resolved
    for field in RULE_FIELDS:
        if field in resolved:
            raise UserError(f"expected rules or {field} in a profile, found both in {settings.get('name')}: remove one")
    return {**resolved, **{field: value for field, value in read_rules(name).items() if field in RULE_FIELDS}}


def _read_yaml(path: Path, what: str) -> dict[str, Any]:
    try:
        settings = parse_yaml(path.read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"expected {what} in {path}, found: {error}; fix it") from error
    if not isinstance(settings, dict):
        raise UserError(f"expected {what} in {path}, found {type(settings).__name__}: fix it")
    return settings


@cache
def load_profile(name: str) -> "DeviceProfile":
    """Return the profile of that name; `device_file` says where it comes from."""
    from vramcast.virtual_gpu.profile import parse_profile  # noqa: PLC0415 - imports torch, which names do not need

    return parse_profile(load_device(name))


def device_of_gpu(gpu_name: str) -> str | None:
    """Return the device whose title matches most words of a GPU's name: 'NVIDIA A100-SXM4-40GB' is a100_40gb.

    All words of the title must occur in the name. Profiles of one measured set, with a comma in their title, are left
    out. Of two profiles with the same title, the user's own is preferred.
    """
    words = _words(gpu_name)
    titles = _titles(tuple(device_names()))
    candidates = {name: _words(title) for name, title in titles.items() if "," not in title}
    matches = {name: title for name, title in candidates.items() if title <= words and not (words - title) & _OTHER_GPU}
    return max(matches, key=lambda name: (len(matches[name]), not is_shipped(name)), default=None)


@lru_cache(maxsize=4)  # reading all profiles takes tens of milliseconds, and the service looks up many names
def _titles(names: tuple[str, ...]) -> dict[str, str]:
    return {name: str(read_device(name).get("title")) for name in names}


def device_or_default(gpu_name: str | None, note: Callable[[str], None]) -> str:
    """Return the device of a GPU; if there is none, note that the default device is used instead."""
    device = device_of_gpu(gpu_name or "")
    if device is None:
        note(
            f"no device profile for the GPU {gpu_name}: {DEFAULT_DEVICE} is used, whose context differs: "
            "name a closer one with --device"
        )
    return device or DEFAULT_DEVICE


def _words(text: str) -> set[str]:
    """Return the words and numbers of a GPU's name without those that all names share."""
    return set(re.findall(r"\d*[a-z]+\d+[a-z]*|\d+|[a-z]+", text.lower())) - {"nvidia", "gb"}


def gpu_profiles() -> list["DeviceProfile"]:
    """Return a profile for each kind of GPU, smallest memory first.

    Profiles of one measured set are left out, and profiles that need an installed cuDNN.
    """
    profiles = [load_profile(name) for name in device_names()]
    plain = (item for item in profiles if "," not in item.title and not item.cudnn_release)
    return sorted(plain, key=lambda item: (item.total_mib, item.name))
