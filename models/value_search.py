"""Search the largest or least value that fits with few answers: a batch, a length, a rank, a number of GPUs."""

from collections.abc import Callable, Mapping, Sequence

from vramcast.models.answer import FITS, Answer

AnswerFor = Callable[[int], Answer]
"""Returns the answer for a value."""
_MOST_TRACES = 10
LARGEST = 2**20
"""The search ends below this value."""
_LEAP = 16
"""Factor to the next value if a larger one took no more memory, as with batches of small networks."""
_EXACT = 100
"""Resolution of the search: a hundredth of the value is within the estimate's error."""


def largest_batch(answer_for: AnswerFor, start: Answer) -> tuple[int, Answer | None]:
    """Return the largest batch whose safe figure fits, to one percent, with its answer; (0, None) if none fits."""
    return largest_fitting(answer_for, start.batch_size, start)


def largest_fitting(
    answer_for: AnswerFor, start: int, first: Answer, most: int = LARGEST - 1
) -> tuple[int, Answer | None]:
    """Return the largest value up to `most` whose safe figure fits, to one percent, with its answer.

    The memory is nearly linear in the value. The next one is where a line through the two answers nearest to the
    capacity meets it; every third time it is the middle of the remaining range, because memory also rises in steps.
    (0, None) if no value fits.
    """
    answers = {start: first}
    for trace in range(_MOST_TRACES):
        value = _next(answers, halve=trace % 3 == 2, most=most)
        if value is None:
            break
        answers[value] = answer_for(value)
    best = max((value for value, answer in answers.items() if answer.verdict == FITS), default=0)
    return best, answers.get(best)


def least_fitting(answer_for: AnswerFor, values: Sequence[int]) -> tuple[int, Answer | None]:
    """Return the first of some ascending values whose safe figure fits, with its answer; (0, None) if none fits.

    The memory falls from value to value, so that the range is halved with each answer.
    """
    low, high, best = 0, len(values), None
    while low < high:
        middle = (low + high) // 2
        answer = answer_for(values[middle])
        if answer.verdict == FITS:
            high, best = middle, answer
        else:
            low = middle + 1
    return (values[high], best) if best else (0, None)


def _next(answers: Mapping[int, Answer], halve: bool, most: int) -> int | None:
    """Return the next value to try, or None if the search is over."""
    failing = [value for value, answer in answers.items() if answer.verdict != FITS]
    low = max((value for value, answer in answers.items() if answer.verdict == FITS), default=0)
    high = min(failing, default=most + 1)
    if high - low <= max(1, low // _EXACT if failing else 1):
        return None
    if len(answers) == 1:
        ((value, only),) = answers.items()
        share = only.capacity_mib / only.safe_mib
        guess = int(value * (share * 0.9 if share > 1 else share / 2))
    elif failing and low and halve:
        guess = (low + high) // 2
    else:
        crossing = _crossing(answers)
        if crossing is None:  # memory does not grow here
            guess = (low + high) // 2 if failing else _LEAP * low
        else:
            guess = crossing if failing else crossing + max(1, crossing // 50)  # an upper bound is needed too
    return min(max(guess, low + 1), high - 1)


def _crossing(answers: Mapping[int, Answer]) -> int | None:
    """Return the value at which a line through the two answers nearest to the capacity meets it."""
    near = sorted(answers.items(), key=lambda item: abs(item[1].safe_mib - item[1].capacity_mib))[:2]
    (first, nearest), (second, other) = near
    rise = nearest.safe_mib - other.safe_mib
    run = first - second
    if rise * run <= 0:
        return None
    return first + int((nearest.capacity_mib - nearest.safe_mib) * run / rise)
