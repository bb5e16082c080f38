"""Hydra composes `conf/`; what it finds wrong becomes one sentence."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from vramcast.dataset_builder.devices import CONF, user_conf
from vramcast.errors import UserError, suggestion


@dataclass(frozen=True)
class Command:
    """A command that is configured by overrides: what its sentences speak of."""

    config: str
    """The file in `conf/`."""
    words: str
    """How it is called, such as 'vramcast build'."""
    what: str
    """What one composed configuration is, such as 'build'."""
    keys: tuple[str, ...]
    """On the top level, groups among them."""
    example: str


def compose_config(command: Command, overrides: Sequence[str]) -> DictConfig:
    """The configuration of a command, its file changed by the overrides."""
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = compose(command.config, overrides=[*overrides, *_search_path()])
        OmegaConf.resolve(config)
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:  # a ValueError for 'space=null'
        if _is_interrupt(error):
            raise KeyboardInterrupt from error
        raise UserError(_sentence(error, command, overrides)) from error
    return config


def _search_path() -> list[str]:
    """Return the override that adds the user's own configuration, if there is one."""
    own = user_conf().resolve()
    return [f"hydra.searchpath=['file://{own}']"] if own.is_dir() else []


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether a Ctrl-C is behind an error: OmegaConf wraps whatever reaches it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _sentence(error: Exception, command: Command, overrides: Sequence[str]) -> str:
    """Hydra's paragraphs as one sentence."""
    text = str(error)
    group = re.search(r"Could not find '(\w+)/([^']+)'", text)
    if group:
        options = sorted({path.stem for conf in (CONF, user_conf()) for path in (conf / group[1]).glob("*.yaml")})
        return f"expected {group[1]} to be one of {options}, found {group[2]!r}: {suggestion(group[2], options)}"
    key = re.search(r"Could not override '([^']+)'", text)
    if key:
        if "." in key[1]:
            mend = f"see {command.words} --cfg, or add it as +{key[1]}=VALUE (after ~{key[1]} to replace all of it)"
            return f"expected keys that are there, found others in {key[1]!r}: {mend}"
        hint = suggestion(key[1], command.keys, f"choose from {sorted(command.keys)}")
        return f"expected a key of the {command.what}, found {key[1]!r}: {hint}"
    first = next(iter((text or str(error.__cause__)).strip().splitlines()), type(error).__name__)
    return f"expected overrides such as {command.example}, found {list(overrides)}: {first}"
