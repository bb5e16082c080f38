"""Ends the loops of a script early once its memory has settled, so that the phases after training are reached.

Three things end early: epochs of loaders that feed a network in training, loops of the user's own files, and loops of
libraries, whose modules in `libraries/` ask `ends_epoch` and `ends_training`. A number that counts iterations jumps
to the next value that a condition of the script asks for, such as a multiple of the steps between evaluations.
"""

from collections.abc import Callable, Iterator, Sequence
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

from vramcast.virtual_gpu.cuda.evaluation_growth import EvaluationEpoch, EvaluationGrowth
from vramcast.virtual_gpu.cuda.iteration_counters import Conditions, IterationCounter

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.run_record import RunRecord

STEPS_AN_EPOCH = 2
"""Optimizer steps of an epoch that is ended early."""
EPOCHS = 2
"""Epochs of a library's loop: a second one starts with what the first one has left behind."""
MOST_EPOCHS = 20
"""The same, while an evaluation that the library was configured to do has not run."""
_MOST_UNWATCHED = 1000
"""Iterations without an optimizer step after which a loop is not watched any more."""


class FastForward:
    """Decides which loops end early. `begin` turns it on; the stop rule turns it off while a new peak settles."""

    def __init__(
        self, record: "RunRecord", expected: Sequence[Callable[[], str | None]], growth: EvaluationGrowth
    ) -> None:
        self._record = record
        self.growth = growth
        self.is_allowed = False
        """Loops may end early at all; else only this module's notes are used."""
        self.expected = expected
        """Phases that libraries were configured to run, see `PhaseCoverage`."""
        self.has_begun = False
        self.is_active = False
        self.cut_after: int | None = None
        """Steps after which a loop has ended early, or a number has jumped."""
        self.can_forward = False
        """The script trains in a loop that can end early."""
        self.on_begin: list[Callable[[], None]] = []
        self._begun_at = 0
        """Steps of the run when it was turned on."""
        self._clock = 0
        self._counters: dict[str, IterationCounter] = {}
        self._epochs: WeakKeyDictionary[Any, _Epoch] = WeakKeyDictionary()
        self._idle: dict[str, int] = {}
        """Iterations of loops of the user's files without an optimizer step."""
        self._running: list[_Loop] = []
        """Loops of the user's files, outermost first."""

    def begin(self) -> None:
        """Turn it on."""
        self.is_active = True
        if not self.has_begun:
            self.has_begun = True
            self._begun_at = len(self._record.steps)
            for call in self.on_begin:
                call()

    def note_step(self) -> None:
        """Note that an optimizer has stepped."""
        if self._running:
            self._running[-1].own_steps += 1

    def ends_epoch(self, steps: int) -> bool:
        """Return True if the epoch of a library's loop is to end, which has made some steps."""
        self.can_forward = True
        return self._cut(self.is_active and steps >= STEPS_AN_EPOCH)

    def ends_training(self, epochs: int) -> bool:
        """Return True if a library's loop is to end after some epochs: all that it was configured to do has run."""
        enough = MOST_EPOCHS if any(expected() for expected in self.expected) else EPOCHS
        return self._cut(self.is_active and epochs >= enough)

    def loop(self, iterable: Any, place: str, divisors: Conditions, bounds: Conditions) -> Any:
        """Return the values of a `for` loop of the user's."""
        if self._idle.get(place, 0) > _MOST_UNWATCHED or get_ident() != self._record.thread:
            return iterable
        inner = getattr(iterable, "iterable", None) if type(iterable).__name__.startswith("tqdm") else None
        counter = self._counters.setdefault(place, IterationCounter())
        if isinstance(iterable, range):
            return self._range(iterable, _Loop(self, place), counter, divisors, bounds)
        if isinstance(inner, range):
            return _shown(self._range(inner, _Loop(self, place), counter, divisors, bounds), iterable)
        if type(iterable) is enumerate:
            return self._pairs(iterable, _Loop(self, place), counter, divisors, bounds)
        return self._others(iter(iterable), _Loop(self, place))

    def count(self, value: Any, name: str, divisors: Conditions, bounds: Conditions) -> int:
        """Return how much `value += 1` adds."""
        if type(value) is not int or get_ident() != self._record.thread:
            return 1
        counter = self._counters.setdefault(name, IterationCounter())
        added, steps = 1, self._record.optimizer_calls
        if self.is_active and steps > counter.steps >= 0:
            added = (counter.following or value + 1) - value
            self._cut(added > 1)
        counter.steps = steps
        self._visit(counter, value + added, divisors, bounds)
        return added

    def ends_loader(self, iterator: Any) -> bool:
        """Return True if the iterator of a loader is to end in the place of its next batch."""
        epoch, record = self._epochs.get(iterator), self._record
        if epoch is None or not iterator._num_yielded:
            self._epochs[iterator] = _Epoch(self._clock, record)
            return False
        epoch.feeds_training = epoch.feeds_training or record.trained_calls > epoch.trained_calls
        self.can_forward = self.can_forward or epoch.feeds_training
        if not epoch.is_over and self.is_allowed and not epoch.feeds_training:
            epoch.is_over = record.evaluated_calls > epoch.evaluated_calls and self._cut(
                self.growth.ends(epoch.evaluation, _length(iterator))
            )
            epoch.evaluated_calls = record.evaluated_calls
        if not epoch.is_over and epoch.feeds_training:
            epoch.is_over = self.may_end(epoch.start, len(record.steps) - epoch.steps)
        return epoch.is_over

    @property
    def has_unmet(self) -> bool:
        """Return True if a number has not had all values that conditions of the script ask for."""
        return any(counter.is_pending for counter in self._counters.values())

    def may_end(self, start: int, steps: int) -> bool:
        """Return True if a loop may end: it has stepped, and no number that it counts has values to come."""
        if not self.is_active or min(steps, len(self._record.steps) - self._begun_at) < STEPS_AN_EPOCH:
            return False
        pending = (item.visited_at > start and item.is_pending for item in self._counters.values())
        return self._cut(not any(pending))

    def _visit(
        self, counter: IterationCounter, value: int, divisors: Conditions, bounds: Conditions, last: int | None = None
    ) -> None:
        self._clock += 1
        if self.has_begun:
            counter.visited_at = self._clock
            counter.visit(value, divisors, bounds, last)

    def _cut(self, is_cut: bool) -> bool:
        if is_cut and self.cut_after is None:
            self.cut_after = len(self._record.steps)
        return is_cut

    def _range(
        self, values: range, running: "_Loop", counter: IterationCounter, divisors: Conditions, bounds: Conditions
    ) -> Iterator[int]:
        """Yield numbers; after an optimizer step those that are asked for alone, and the last."""
        last = len(values) - 1
        position = 0
        with running:
            while position <= last:
                running.begin_iteration()
                self._visit(counter, values[position], divisors, bounds, values[-1] if values.step > 0 else None)
                yield values[position]
                following = position + 1
                if running.has_stepped() and self.is_active and following < last:
                    if not counter.visited_at:
                        self._visit(counter, values[position], divisors, bounds, values[-1])
                    wanted = counter.following if values.step > 0 else None
                    position_of_wanted = last if wanted is None else -(-(wanted - values[0]) // values.step)
                    self._cut(position_of_wanted > following)
                    following = max(following, min(position_of_wanted, last))
                position = following

    def _pairs(
        self, pairs: Any, running: "_Loop", counter: IterationCounter, divisors: Conditions, bounds: Conditions
    ) -> Iterator[Any]:
        """Yield numbered items; the numbers jump to those that are asked for, and no item is left out."""
        shift = 0
        with running:
            for pair in pairs:
                number, item = pair[0] + shift, [(pair[0] + shift, pair[1])]
                del pair  # the script alone decides how long an item lives
                running.begin_iteration()
                self._visit(counter, number, divisors, bounds)
                yield item.pop()
                if not running.has_stepped() or not self.is_active:
                    continue
                if not counter.visited_at:
                    self._visit(counter, number, divisors, bounds)
                if counter.following is None and running.may_end():
                    return
                added = (counter.following or number + 1) - number - 1
                self._cut(added > 0)
                shift += added

    def _others(self, iterator: Iterator[Any], running: "_Loop") -> Iterator[Any]:
        with running:
            while True:
                running.begin_iteration()
                try:
                    yield next(iterator)
                except StopIteration:
                    return
                if running.has_stepped() and self.is_active and running.may_end():
                    return


def _length(iterator: Any) -> int | None:
    try:
        return len(iterator)
    except (TypeError, NotImplementedError):  # a stream
        return None


class _Epoch:
    """One pass of an iterator of a loader."""

    def __init__(self, start: int, record: "RunRecord") -> None:
        self.start, self.steps = start, len(record.steps)
        self.trained_calls, self.evaluated_calls = record.trained_calls, record.evaluated_calls
        self.evaluation = EvaluationEpoch()
        self.feeds_training = False
        self.is_over = False


class _Loop:
    """A loop of the user's files while it runs."""

    def __init__(self, forward: FastForward, place: str) -> None:
        self.own_steps = 0
        """Optimizer steps that no inner loop has made."""
        self._forward = forward
        self._place = place
        self._start = forward._clock
        self._calls_before = 0
        self._calls_at_start = forward._record.optimizer_calls

    def __enter__(self) -> Self:
        self._forward._running.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._forward._running.remove(self)

    def begin_iteration(self) -> None:
        """Note that an iteration begins."""
        self._calls_before = self._forward._record.optimizer_calls

    def has_stepped(self) -> bool:
        """Return True if an optimizer has stepped in the iteration."""
        forward = self._forward
        stepped = forward._record.optimizer_calls > self._calls_before
        forward.can_forward = forward.can_forward or stepped
        idle = forward._idle
        idle[self._place] = 0 if stepped else idle.get(self._place, 0) + 1
        return stepped

    def may_end(self) -> bool:
        """Return True if the loop may end; one whose inner loops have stepped may not."""
        return self._forward.may_end(self._start, self.own_steps)


def _shown(values: Iterator[int], bar: Any) -> Iterator[int]:
    """Yield values, and count them in a progress bar."""
    for value in values:
        yield value
        bar.update(1)
    bar.close()
