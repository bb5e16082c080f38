"""Repeats the second of several accumulated batches instead of tracing each: the later ones allocate alike."""

from collections.abc import Sequence

from vramcast.virtual_gpu.replay.replay import FREE
from vramcast.virtual_gpu.tracing.trace import Tracer


def repeat_batch(tracer: Tracer, starts: Sequence[int], count: int) -> bool:
    """Append the events of the second batch of a step `count` times, as if as many batches had followed.

    `starts` are the indices of events at which the first and the second batch began. Return False, and append
    nothing, unless the blocks that the second batch leaves are those that it freed of the first: then each batch
    replaces the tensors of the one before, and all after the first are alike.
    """
    events = tracer.trace.events
    first, second = starts
    before, own = events[first:second], events[second:]
    if any(block < 0 for block, _ in own):  # an emptied cache, or an operation on a stream
        return False
    sizes = dict(item for item in own if item[1] != FREE)
    freed = {block for block, size in own if size == FREE}
    left = [item for item in own if item[1] != FREE and item[0] not in freed]
    replaced = [item for item in before if item[1] != FREE and item[0] in freed]
    if len(replaced) != len(freed - sizes.keys()) or [size for _, size in left] != [size for _, size in replaced]:
        return False
    names = {block: block for block, _ in left}
    for _ in range(count):
        names = {old: names[new] for (old, _), (new, _) in zip(replaced, left, strict=True)}
        _append(tracer, own, names)
    tracer.rename({block: names[block] for block, _ in left})
    return True


def _append(tracer: Tracer, own: list[tuple[int, int]], names: dict[int, int]) -> None:
    """Append a copy with new blocks, whose names are added to `names`."""
    trace = tracer.trace
    for block, size in own:
        if size != FREE:
            names[block] = len(trace.uses)
            trace.uses.append(trace.uses[block])
            trace.owners.append(trace.owners[block])
        trace.events.append((names[block], size))
