"""Steps of a generation that repeat: each allocates what the one before did, in sizes that grow with the cache.

A step that decodes one token makes the same allocations and frees as an earlier one, a period apart: attention pads
masks to a multiple of 16 elements, for example. Where each size grows by the same bytes from period to period, later
steps are known. They go through the allocator without being run, and the blocks of the last one take the places of$
that the script's tensors have.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from vramcast.virtual_gpu.allocator.sizes import SMALL_SIZE_BYTES
from vramcast.virtual_gpu.replay.replay import FREE, Event

_PERIODS = (1, 8, 16)
_CHECKED = 2
"""Steps whose sizes must have been foreseen by the two periods before them."""
_MOST_EVENTS = 400_000
_ALLOCATE = -1
_FOREIGN = -2
"""An event that no other step can repeat: of a block from before, or of the whole device."""

_Operation = tuple[int, int]
"""An allocation of the step by its ordinal, or a free: how many steps ago the block was born, and its ordinal."""
_Table = list[int | None]
"""The blocks of a step that are alive, by ordinal."""


@dataclass(frozen=True)
class DecodingStep:
    """The allocations and frees of a step."""

    operations: tuple[_Operation, ...]
    sizes: tuple[int, ...]
    blocks: tuple[int, ...]


class DecodingSteps:
    """The steps of a generation so far, read from the events of the trace."""

    def __init__(self) -> None:
        self.steps: list[DecodingStep] = []
        self._births: dict[int, _Operation] = {}
        """The step and the ordinal of each block that is alive."""

    def add(self, events: Sequence[Event]) -> None:
        """Read the events of one step."""
        place = len(self.steps)
        operations: list[_Operation] = []
        sizes: list[int] = []
        blocks: list[int] = []
        for block, size in events:
            if block < 0:
                operations.append((_FOREIGN, block))
            elif size != FREE:
                self._births[block] = place, len(sizes)
                operations.append((_ALLOCATE, len(sizes)))
                sizes.append(size)
                blocks.append(block)
            elif block in self._births:
                born, ordinal = self._births.pop(block)
                operations.append((place - born, ordinal))
            else:
                operations.append((_FOREIGN, block))
        self.steps.append(DecodingStep(tuple(operations), tuple(sizes), tuple(blocks)))

    def periods(self) -> Iterator[int]:
        """Yield the numbers of steps after which each step may repeat, the smallest first."""
        return (period for period in _PERIODS if self._repeats(period))

    def _repeats(self, period: int) -> bool:
        count = len(self.steps)
        first = count - 2 * period - _CHECKED
        if first < 0 or self._piles_up(first, period):
            return False
        alike = all(self._is_like(place, period) for place in range(count - period, count))
        return alike and all(self._grows_evenly(place, period) for place in range(count - _CHECKED, count))

    def _piles_up(self, first: int, period: int) -> bool:
        """Return True if blocks of steps from one on are alive that no step frees."""
        return any(self.oldest(period) < age < len(self.steps) - first for age, _ in self.alive.values())

    def _is_like(self, place: int, period: int) -> bool:
        """Return True if a step makes the allocations of the one a period before, and calls libraries as it does."""
        before, step = self.steps[place - period], self.steps[place]
        if step.operations != before.operations or any(kind == _FOREIGN for kind, _ in step.operations):
            return False
        calls = ((one, two) for one, two in zip(before.sizes, step.sizes, strict=True) if min(one, two) < 0)
        return all(one == two for one, two in calls)

    def _grows_evenly(self, place: int, period: int) -> bool:
        """Return True if a step is as large as the two before it, a period apart, foresee."""
        first, second, third = (self.steps[place - back * period] for back in (2, 1, 0))
        alike = first.operations == second.operations == third.operations
        return alike and all(
            two - one == three - two for one, two, three in zip(first.sizes, second.sizes, third.sizes, strict=True)
        )

    def oldest(self, period: int) -> int:
        """Return for how many steps a block lives that a later step frees."""
        return max((age for step in self.steps[-period:] for age, _ in step.operations), default=0)

    def foresees(self, later: Sequence[DecodingStep], distance: int, period: int) -> bool:
        """Return True if some steps are those to come, of which the last one comes `distance` after the last so far."""
        for back, step in enumerate(reversed(later)):
            place = distance - back
            repeated = self.template(place, period)
            if repeated.operations != step.operations or self.sizes(place, period) != step.sizes:
                return False
        return True

    def sizes(self, ahead: int, period: int) -> tuple[int, ...]:
        """Return the sizes of the step that comes `ahead` after the last one."""
        template = self.template(ahead, period)
        before = self.steps[self._place(ahead, period) - period].sizes
        periods = -(-ahead // period)
        return tuple(now + (now - then) * periods for now, then in zip(template.sizes, before, strict=True))

    def _place(self, ahead: int, period: int) -> int:
        return len(self.steps) - period + (ahead - 1) % period

    def template(self, ahead: int, period: int) -> DecodingStep:
        """Return the step that the one which comes `ahead` after the last one repeats."""
        return self.steps[self._place(ahead, period)]

    @property
    def alive(self) -> dict[int, _Operation]:
        """The blocks of these steps that are alive: how many steps ago each was born, and its ordinal."""
        last = len(self.steps) - 1
        return {block: (last - place, ordinal) for block, (place, ordinal) in self._births.items()}


class Continuation:
    """The steps to come of a generation, played without being run.

    Where there are very many, small blocks that live within a step are played in the last period alone: they have a
    pool of their own, which the steps before have filled.

    Args:
        steps: The steps so far.
        period: After so many steps they repeat.
        birth: Allocates a size, for what the given block of an earlier step holds, and returns the block.
        emit: Plays an event.
    """

    def __init__(
        self,
        steps: DecodingSteps,
        period: int,
        birth: Callable[[int, int], int],
        emit: Callable[[Event], None],
    ) -> None:
        self._steps, self._period, self._birth, self._emit = steps, period, birth, emit
        oldest = steps.oldest(period)
        self._replaced = {block: place for block, place in steps.alive.items() if place[0] <= oldest}
        self._tables: deque[_Table] = deque(maxlen=oldest + 1)
        """Of the latest step first."""
        for step in steps.steps[-oldest - 1 :]:
            self._tables.appendleft([None] * len(step.blocks))
        for block, (age, ordinal) in self._replaced.items():
            self._tables[age][ordinal] = block

    def play(self, count: int) -> None:
        """Play a number of steps, a multiple of the period."""
        is_long = count * len(self._steps.steps[-1].operations) > _MOST_EVENTS
        for ahead in range(1, count + 1):
            sizes = self._steps.sizes(ahead, self._period)
            template = self._steps.template(ahead, self._period)
            skipped = _small(template, sizes) if is_long and ahead <= count - self._period else frozenset()
            own: _Table = [None] * len(sizes)
            self._tables.appendleft(own)
            for age, ordinal in template.operations:
                if age == _ALLOCATE:
                    if ordinal not in skipped:
                        own[ordinal] = self._birth(sizes[ordinal], template.blocks[ordinal])
                elif (block := self._tables[age][ordinal]) is not None:
                    self._tables[age][ordinal] = None
                    self._emit((block, FREE))

    def replacements(self) -> dict[int, int | None]:
        """Return the block that stands in the place of each that was alive before, and free all others."""
        replacements: dict[int, int | None] = {}
        for block, (age, ordinal) in self._replaced.items():
            replacements[block] = self._tables[age][ordinal]
            self._tables[age][ordinal] = None
        for block in [item for table in self._tables for item in table if item is not None]:
            self._emit((block, FREE))
        return replacements


def _small(step: DecodingStep, sizes: Sequence[int]) -> frozenset[int]:
    """Return the small allocations that a step frees itself."""
    own = (ordinal for age, ordinal in step.operations if age == 0)
    return frozenset(ordinal for ordinal in own if 0 <= sizes[ordinal] <= SMALL_SIZE_BYTES)
