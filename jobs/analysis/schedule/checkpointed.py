"""The segments of a network that checkpointing recomputes, by the names of its layers."""

from collections import defaultdict
from collections.abc import Sequence


def checkpointed_segments(names: Sequence[str]) -> dict[int, int]:
    """Return the first layer of each segment by its last one: the composite parts of the outermost lists.

    >>> checkpointed_segments(["stem", "blocks.0.norm", "blocks.0.linear", "blocks.1.norm", "blocks.1.linear", "head"])
    {2: 1, 4: 3}
    """
    lists = _lists_of_blocks(names)
    places: dict[str, list[int]] = defaultdict(list)
    for place, name in enumerate(names):
        block = _block(name, lists)
        if block is not None:
            places[block].append(place)
    return {item[-1]: item[0] for item in places.values() if item[-1] - item[0] + 1 == len(item)}


def _lists_of_blocks(names: Sequence[str]) -> set[str]:
    """Return the names of lists with several composite parts."""
    parts: dict[str, set[str]] = defaultdict(set)
    for name in names:
        words = name.split(".")
        for index, word in enumerate(words[:-1]):
            if word.isdigit():
                parts[".".join(words[:index])].add(word)
    return {name for name, blocks in parts.items() if len(blocks) > 1}


def _block(name: str, lists: set[str]) -> str | None:
    words = name.split(".")
    for index, word in enumerate(words):
        if word.isdigit() and ".".join(words[:index]) in lists:
            return ".".join(words[: index + 1])
    return None
