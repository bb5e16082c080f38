"""Composes configurations with Hydra, and turns its errors into one sentence."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from vramcast.device.profiles import CONF, user_conf
from vramcast.errors import UserError, suggestion
from vramcast.files.yaml_text import check_aliases


@dataclass(frozen=True)
class Command:
    """A command that is configured by overrides, for its error messages."""

    config: str
    """The file in `conf/`."""
    words: str
    """The command line, such as 'vramcast build'."""
    what: str
    """The name of one configuration, such as 'build'."""
    keys: tuple[str, ...]
    """Keys at the top level, including groups."""
    example: str


def compose_config(command: Command, overrides: Sequence[str]) -> DictConfig:
    """Compose the configuration of a command from its file and the overrides."""
    search_path = _search_path()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = compose(command.config, overrides=[*overrides, *search_path])
        OmegaConf.resolve(config)
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:  # a ValueError for 'space=null'
        if _is_interrupt(error):
            raise KeyboardInterrupt from error
        raise UserError(_sentence(error, command, overrides)) from error
    return config


def _search_path() -> list[str]:
    """Return the override that adds the user's own configuration, if there is one."""
    own = user_conf().resolve()
    if not own.is_dir():
        return []
    for path in own.rglob("*.yaml"):
        check_aliases(path)  # OmegaConf makes a copy for each
    return [f"hydra.searchpath=['file://{own}']"]


def _is_interrupt(error: BaseException | None) -> bool:
    """Return whether a Ctrl-C caused an error: OmegaConf wraps every exception."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _sentence(error: Exception, command: Command, overrides: Sequence[str]) -> str:
    """Return one sentence for an error of Hydra."""
    text = str(error)
    group = re.search(r"Could not find '(\w+)/([^']+)'", text)
    if group:
        options = sorted({path.stem for conf in (CONF, user_conf()) for path in (conf / group[1]).glob("*.yaml")})
        return f"expected {group[1]} to be one of {options}, found {group[2]!r}: {suggestion(group[2], options)}"
    key = re.search(r"Could not override '([^']+)'", text)
    if key:
        if "." in key[1]:
            fix = f"see {command.words} --cfg, or add it as +{key[1]}=VALUE (after ~{key[1]} to replace all of it)"
            return f"expected existing keys, found others in {key[1]!r}: {fix}"
        hint = suggestion(key[1], command.keys, f"choose from {sorted(command.keys)}")
        return f"expected a key of the {command.what}, found {key[1]!r}: {hint}"
    first = next(iter((text or str(error.__cause__)).strip().splitlines()), type(error).__name__)
    return f"expected overrides such as {command.example}, found {list(overrides)}: {first}"
