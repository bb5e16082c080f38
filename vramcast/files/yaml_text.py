"""YAML of users, read within bounds: aliases can make a short text hold more values than memory has room for."""

from pathlib import Path
from typing import Any

from vramcast.error_words import shortened
from vramcast.errors import UserError

_MOST_VALUES = 2**20
_LONGEST_NUMBER = 100
"""Characters; Python refuses to print integers of more than 4,300 digits, so no error could name a longer one."""
_LONGEST_REASON = 300
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def parse_yaml(text: str, path: object) -> Any:
    """Return the value of a YAML text from a path; refuse one whose aliases stand for too many."""
    import yaml  # noqa: PLC0415 - few commands use it

    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _count(node, {})
        return loader.construct_document(node)
    # a wrong value under a tag ('!!int x', '!!bool x', a date that does not exist) raises whatever its parser raises
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = shortened(" ".join(str(error).split()), _LONGEST_REASON)
        raise UserError(f"expected YAML in {path}, found: {reason}; fix it") from error


def check_aliases(path: Path) -> None:
    """Raise UserError for a file whose aliases stand for too many values, before a library reads it."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if "&" in text and "*" in text:
        parse_yaml(text, path)


def _count(node: Any, counts: dict[int, int]) -> int:
    """Return the number of values that a node stands for; raise ValueError for too many.

    Nodes are counted before values are made of them, because merge keys ('<<') copy what they name.
    """
    import yaml  # noqa: PLC0415 - few commands use it

    if id(node) not in counts:
        counts[id(node)] = _MOST_VALUES  # met again below itself
        if isinstance(node, yaml.ScalarNode):
            if node.tag in _NUMBERS and len(node.value) > _LONGEST_NUMBER:
                raise ValueError(f"a number of {len(node.value)} characters")
            children: list[Any] = []
        elif isinstance(node, yaml.MappingNode):
            children = [item for pair in node.value for item in pair]
        else:
            children = node.value
        counts[id(node)] = 1 + sum(_count(item, counts) for item in children)
        if counts[id(node)] > _MOST_VALUES:
            raise ValueError(f"aliases that stand for more than {_MOST_VALUES} values")
    return counts[id(node)]
