"""The largest batch that fits, from few traces: memory is nearly a line in the batch, and every answer a real one."""

from collections.abc import Callable, Sequence

from vramcast.models.answer import FITS, Answer

Ask = Callable[[int], Answer]
"""The answer for a batch size."""
_MOST_TRACES = 10
_LARGEST = 2**20
_LEAP = 16
"""From a batch to the next where more samples took no more memory: small networks hide in what is there anyway."""
_EXACT = 100
"""Batches are told apart to a hundredth of their size: finer steps cost traces, and are within the estimate's error."""


def largest_batch(ask: Ask, start: Answer) -> tuple[int, Answer | None]:
    """The largest batch whose safe answer fits, to one percent, with that answer; (0, None) where none does.

    The next batch to look at is where a line through the two answers that are nearest to the card meets it; every
    third time it is the middle of what is left, for memory rises in steps too.
    """
    known = {start.batch_size: start}
    for trace in range(_MOST_TRACES):
        batch = _next(list(known.values()), halve=trace % 3 == 2)
        if batch is None:
            break
        known[batch] = ask(batch)
    fitting = [answer for answer in known.values() if answer.verdict == FITS]
    best = max(fitting, key=lambda answer: answer.batch_size, default=None)
    return (best.batch_size, best) if best else (0, None)


def _next(known: Sequence[Answer], halve: bool) -> int | None:
    """The batch to look at next, None where there is nothing left to find out."""
    failing = [answer.batch_size for answer in known if answer.verdict != FITS]
    low = max((answer.batch_size for answer in known if answer.verdict == FITS), default=0)
    high = min(failing, default=_LARGEST)
    if high - low <= max(1, low // _EXACT):
        return None
    if len(known) == 1:
        only = known[0]
        share = only.capacity_mib / only.safe_mib
        guess = int(only.batch_size * (share * 0.9 if share > 1 else share / 2))
    elif failing and low and halve:
        guess = (low + high) // 2
    else:
        crossing = _crossing(known)
        if crossing is None:  # no line to follow
            guess = (low + high) // 2 if failing else _LEAP * low
        else:
            guess = crossing if failing else crossing + max(1, crossing // 50)  # a bound from above is wanted too
    return min(max(guess, low + 1), high - 1)


def _crossing(known: Sequence[Answer]) -> int | None:
    """Where a line through the two answers that are nearest to the card meets it."""
    near = sorted(known, key=lambda answer: abs(answer.safe_mib - answer.capacity_mib))[:2]
    rise = near[0].safe_mib - near[1].safe_mib
    run = near[0].batch_size - near[1].batch_size
    if rise * run <= 0:
        return None
    return near[0].batch_size + int((near[0].capacity_mib - near[0].safe_mib) * run / rise)
