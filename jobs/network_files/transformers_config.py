"""Checks a config.json of transformers before a class of the installed library is built from it on the meta device."""

from collections.abc import Iterator, Mapping
from typing import Any

from vramcast.errors import UserError
from vramcast.jobs.network_files.limits import shown, text_of

_LARGEST = 2**31
_MOST_LAYERS = 1000
_MOST_EXPERTS = 4096
_DEEPEST = 8
_CODE = ("auto_map", "custom_pipelines")


def is_transformers_config(value: Any) -> bool:
    """Return whether a JSON value is a configuration of transformers."""
    return isinstance(value, Mapping) and ("model_type" in value or isinstance(value.get("architectures"), list))


def check_config(value: Mapping[str, Any]) -> None:
    """Raise a UserError for a configuration that names code, or one too large to be built."""
    named = value.get("architectures")
    if not isinstance(named, list) or not named:
        raise UserError(
            "expected 'architectures' in the configuration, found none: add the class, as in [\"LlamaForCausalLM\"]"
        )
    if not text_of(named[0], "the first of architectures").isidentifier():
        raise UserError(f"expected a class of transformers in architectures, found {shown(named[0])}: name one")
    for place, key, item in _settings(value, 0):
        if key in _CODE:
            raise UserError(
                f"expected a configuration of a class that transformers has, found {key}, which names code of its own: "
                "such code is never run; build the network in a file, and name path/to/file.py:function"
            )
        if isinstance(item, int) and not isinstance(item, bool):
            most = (
                _MOST_LAYERS
                if "layer" in key and "index" not in key
                else _MOST_EXPERTS
                if "experts" in key
                else _LARGEST
            )
            if abs(item) > most and not key.endswith("token_id"):
                raise UserError(
                    f"expected {place} of at most {most} in the configuration, found {shown(str(item))}: change it"
                )


def _settings(value: Any, depth: int, place: str = "") -> Iterator[tuple[str, str, Any]]:
    if depth > _DEEPEST:
        raise UserError(f"expected a configuration of at most {_DEEPEST} levels, found more: flatten it")
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        name = shown(str(key)) if isinstance(value, Mapping) else place.rpartition(".")[2]
        inside = f"{place}.{name}".strip(".") if isinstance(value, Mapping) else place
        yield inside, name, item
        if isinstance(item, Mapping | list):
            yield from _settings(item, depth + 1, inside)
