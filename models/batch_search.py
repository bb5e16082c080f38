"""The largest batch that fits, from few traces: memory is nearly a line in the batch, and every answer a real one."""

from collections.abc import Callable

from models.answer import FITS, Answer

Ask = Callable[[int], Answer]
"""The answer for a batch size."""
_MOST_TRACES = 10
_LARGEST = 2**20


def largest_batch(ask: Ask, start: Answer) -> tuple[int, Answer | None]:
    """The largest batch whose safe answer fits, with that answer; (0, None) where none does.

    Between a batch that fits and one that does not the next is where a line through both meets the card. After ten
    traces the larger of those that fit is the answer.
    """
    fitting: Answer | None = start if start.verdict == FITS else None
    failing: Answer | None = None if fitting else start
    for _ in range(_MOST_TRACES):
        batch = _next(fitting, failing)
        if batch is None:
            break
        answer = ask(batch)
        if answer.verdict == FITS:
            fitting = answer
        else:
            failing = answer
    return (fitting.batch_size, fitting) if fitting else (0, None)


def _next(fitting: Answer | None, failing: Answer | None) -> int | None:
    """The batch to look at next, None where there is nothing left to find out."""
    if fitting is None:
        if failing is None or failing.batch_size == 1:
            return None
        return max(
            1, min(failing.batch_size - 1, int(failing.batch_size * failing.capacity_mib / failing.safe_mib / 2))
        )
    if failing is None:
        grown = int(fitting.batch_size * max(fitting.capacity_mib / fitting.safe_mib * 1.1, 2))
        return min(grown, _LARGEST) if fitting.batch_size < _LARGEST else None
    low, high = fitting.batch_size, failing.batch_size
    if high - low <= 1:
        return None
    slope = (failing.safe_mib - fitting.safe_mib) / (high - low)
    guess = low + int((fitting.capacity_mib - fitting.safe_mib) / slope) if slope > 0 else (low + high) // 2
    # a guess at the edge would be repeated for ever: from there a step inwards
    return min(max(guess, low + 1 + (high - low) // 64), high - 1 - (high - low) // 64)
