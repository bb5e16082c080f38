"""The segments of a network that checkpointing recomputes, by the names of its layers."""

from collections import defaultdict
from collections.abc import Sequence

_INNER_LISTS = ("", "blocks.", "layers.", "layer.")
"""Lists of blocks inside a stage."""


def checkpointed_segments(names: Sequence[str]) -> dict[int, int]:
    """Return the first layer of each segment by its last one: the blocks of the outermost lists, or of their stages.

    >>> checkpointed_segments(["stem", "blocks.0.norm", "blocks.0.linear", "blocks.1.norm", "blocks.1.linear", "head"])
    {2: 1, 4: 3}
    >>> checkpointed_segments(["stages.0.blocks.0.a", "stages.0.blocks.1.a", "stages.1.blocks.0.a"])
    {0: 0, 1: 1, 2: 2}
    >>> checkpointed_segments(["0.0", "0.1", "1.0", "1.1"])
    {1: 0, 3: 2}
    """
    lists = _lists_of_blocks(names)
    segments: dict[int, int] = {}
    start, before = 0, None
    for place, name in enumerate([*names, ""]):
        block = _block(name, lists)
        if block != before:
            if before is not None:
                segments[place - 1] = start
            start, before = place, block
    return segments


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
            return _innermost(".".join(words[: index + 1]), name, lists)
    return None


def _innermost(block: str, name: str, lists: set[str]) -> str:
    """Return the block inside a stage, or the block itself if it is none."""
    rest = name[len(block) + 1 :]
    for inner in _INNER_LISTS:
        if rest.startswith(inner) and f"{block}.{inner}"[:-1] in lists:
            number = rest[len(inner) :].split(".", 1)[0]
            if number.isdigit():
                return _innermost(f"{block}.{inner}{number}", name, lists)
    return block
