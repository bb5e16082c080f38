"""Search the largest batch that fits with few traces: memory is nearly linear in the batch size."""

from collections.abc import Callable, Sequence

from vramcast.models.answer import FITS, Answer

AnswerFor = Callable[[int], Answer]
"""Returns the answer for a batch size."""
_MOST_TRACES = 10
LARGEST = 2**20
"""The search ends below this batch size."""
_LEAP = 16
"""Factor to the next batch if more samples took no more memory, as in small networks."""
_EXACT = 100
"""Resolution of the search: a hundredth of the batch is within the estimate's error."""


def largest_batch(answer_for: AnswerFor, start: Answer) -> tuple[int, Answer | None]:
    """Return the largest batch whose safe figure fits, to one percent, with its answer; (0, None) if none fits.

    The next batch is where a line through the two answers nearest to the capacity meets it; every third time it is the
    middle of the remaining range, because memory also rises in steps.
    """
    answers = {start.batch_size: start}
    for trace in range(_MOST_TRACES):
        batch = _next(list(answers.values()), halve=trace % 3 == 2)
        if batch is None:
            break
        answers[batch] = answer_for(batch)
    fitting = [answer for answer in answers.values() if answer.verdict == FITS]
    best = max(fitting, key=lambda answer: answer.batch_size, default=None)
    return (best.batch_size, best) if best else (0, None)


def _next(answers: Sequence[Answer], halve: bool) -> int | None:
    """Return the next batch to try, or None if the search is over."""
    failing = [answer.batch_size for answer in answers if answer.verdict != FITS]
    low = max((answer.batch_size for answer in answers if answer.verdict == FITS), default=0)
    high = min(failing, default=LARGEST)
    if high - low <= max(1, low // _EXACT):
        return None
    if len(answers) == 1:
        only = answers[0]
        share = only.capacity_mib / only.safe_mib
        guess = int(only.batch_size * (share * 0.9 if share > 1 else share / 2))
    elif failing and low and halve:
        guess = (low + high) // 2
    else:
        crossing = _crossing(answers)
        if crossing is None:  # memory does not grow here
            guess = (low + high) // 2 if failing else _LEAP * low
        else:
            guess = crossing if failing else crossing + max(1, crossing // 50)  # an upper bound is needed too
    return min(max(guess, low + 1), high - 1)


def _crossing(answers: Sequence[Answer]) -> int | None:
    """Return the batch at which a line through the two answers nearest to the capacity meets it."""
    near = sorted(answers, key=lambda answer: abs(answer.safe_mib - answer.capacity_mib))[:2]
    rise = near[0].safe_mib - near[1].safe_mib
    run = near[0].batch_size - near[1].batch_size
    if rise * run <= 0:
        return None
    return near[0].batch_size + int((near[0].capacity_mib - near[0].safe_mib) * run / rise)
