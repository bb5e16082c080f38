"""Traces a whole training run: parameters, a dry run, the first steps, then repetitions of the steady step."""

from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vramcast.virtual_gpu.compiled.networks import compiled_network
from vramcast.virtual_gpu.operators.cuda_paths import cuda_paths
from vramcast.virtual_gpu.operators.kernels import cuda_kernels
from vramcast.virtual_gpu.operators.storage_resizes import traced_resizes
from vramcast.virtual_gpu.replay.replay import EMPTY_CACHE, FREE
from vramcast.virtual_gpu.tracing.accumulation import repeat_batch
from vramcast.virtual_gpu.tracing.owners import is_layer, named_parts
from vramcast.virtual_gpu.tracing.trace import Trace, Tracer, Use
from vramcast.virtual_gpu.tracing.uncompiled import with_plain_step, without_compiler
from vramcast.virtual_gpu.training.loop import MakeInputs, MakeOptimizer, TrainingLoop
from vramcast.virtual_gpu.training.setup import TrainingSetup

_TRACED_BATCHES = 2
"""Batches of a step that are traced before one is repeated."""


@dataclass(frozen=True)
class Step:
    """The events of one step, and the blocks that the next step frees, in order of allocation."""

    events: list[tuple[int, int]]
    left: list[int]


def trace_training(
    subject: nn.Module,
    make_inputs: MakeInputs,
    setup: TrainingSetup,
    epochs: int = 2,
    compute_capability: float = 8.0,
    make_optimizer: MakeOptimizer | None = None,
    owners: bool = False,
    postpone_sums: bool = False,
) -> Trace:
    """Trace a subject on the meta device through `epochs` epochs, each of some full batches and the smaller last one.

    `make_optimizer` replaces the optimizer that the setup names. With `owners`, the trace records the layer of each
    block; with `postpone_sums`, calls in the place of buffers of sums and segments (`SumCall`).
    """
    run = _Run(subject, make_inputs, setup, make_optimizer)
    run.tracer.postpones_sums = postpone_sums
    with (
        cuda_paths(compute_capability),
        traced_resizes(run.tracer),
        compiled_network(run.tracer, subject, setup) as compiled,
        without_compiler(),
        _watched(subject, run.tracer, compiled.hidden()) if owners else nullcontext(),
    ):
        return run.trace(epochs)


def trace_lengths(
    subject: nn.Module,
    make_inputs: MakeInputs,
    setup: TrainingSetup,
    lengths: Sequence[int],
    compute_capability: float = 8.0,
    make_optimizer: MakeOptimizer | None = None,
) -> tuple[Trace, list[list[int]]]:
    """Trace one step for each length, all batches of which have that length; `make_inputs` takes the length.

    Return the trace, and [steps, batches] the first event of each batch.
    """
    run = _Run(subject, make_inputs, setup, make_optimizer)
    with (
        cuda_paths(compute_capability),
        traced_resizes(run.tracer),
        compiled_network(run.tracer, subject, setup),
        without_compiler(),
    ):
        trace = run.trace_each([*lengths, lengths[-1]])  # a step ends where the next one begins
    count = setup.accumulate
    starts = [run.starts[at : at + count] for at in range(0, len(run.starts), count)]
    trace.events = trace.events[: starts[-1][0]]
    return trace, starts[:-1]


class _Run(TrainingLoop):
    """Traces each kind of step once and repeats it."""

    def __init__(
        self,
        subject: nn.Module,
        make_inputs: MakeInputs,
        setup: TrainingSetup,
        make_optimizer: MakeOptimizer | None = None,
    ) -> None:
        tracer = Tracer(cuda_kernels(), cudnn_benchmark=setup.cudnn_benchmark)
        super().__init__(tracer, setup, make_inputs, make_optimizer)
        self.subject = subject
        self.starts: list[int] = []
        """The first event of each traced batch."""
        self.repeats_batches = True
        self.names = {id(module): name for name, module in named_parts(subject)}

    def owner_of(self, module: nn.Module, tensor: Tensor) -> str:
        """Return the name of the module."""
        return self.names[id(module)]

    def phased(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Let the steps of an optimizer be a phase of their own, without torch's compiler."""
        return super().phased(with_plain_step(optimizer))

    def trace(self, epochs: int) -> Trace:
        """Trace the different steps, then compose epochs from them."""
        setup, tracer = self.setup, self.tracer
        self.place(self.subject)
        sizes = [setup.batch_size, setup.batch_size]
        sizes += [setup.last_batch_size] if setup.last_batch_size else []
        with tracer:
            self.start(self.subject)
            optimizer = self.optimizer(list(self.subject.parameters()))
            start = list(tracer.trace.events)
            steps = list(self._traced(optimizer, sizes, len(start)))
            self._ahead.clear()
        return self._compose(start, steps, epochs)

    def trace_each(self, sizes: Sequence[int]) -> Trace:
        """Trace one step for each size and every batch of it, without a dry run."""
        self.repeats_batches = False
        self.place(self.subject)
        with self.tracer:
            optimizer = self.optimizer(list(self.subject.parameters()))
            for _ in self._traced(optimizer, sizes, 0):
                pass
        return self.tracer.trace

    def batches(self, size: int) -> Iterator[tuple[Any, ...]]:
        """Yield the batches of a step; those after the second repeat its events if they can."""
        count = self.setup.accumulate
        for index in range(count):
            may_repeat = index == _TRACED_BATCHES and self.repeats_batches
            if may_repeat and repeat_batch(self.tracer, self.starts[-_TRACED_BATCHES:], count - index):
                return
            self.starts.append(len(self.tracer.trace.events))
            yield self.next_batch(size)

    def _traced(self, optimizer: torch.optim.Optimizer, sizes: Sequence[int], start: int) -> Iterator[Step]:
        events = self.tracer.trace.events
        for _ in self.steps(self.subject, optimizer, sizes):
            self.mark_uses(self.subject, optimizer.state)
            own = events[start:]
            start = len(events)
            yield Step(own, self._left(own))

    def _left(self, events: list[tuple[int, int]]) -> list[int]:
        """Return the blocks that a step leaves alive, except permanent ones."""
        permanent = (Use.OPTIMIZER_STATE, Use.WORKSPACE)
        dead = {block for block, size in events if size == FREE}
        uses = self.tracer.trace.uses
        return [block for block, size in events if size != FREE and block not in dead and uses[block] not in permanent]

    def _compose(self, start: list[tuple[int, int]], steps: list[Step], epochs: int) -> Trace:
        """Compose a first and a steady step, epochs of two steady steps and the last batch, and a final steady step."""
        trace = self.tracer.trace
        first, steady, *odd = steps
        trace.events = [*start, *first.events, *steady.events]
        if any(len(step.left) != len(steady.left) for step in steps):
            trace.events += [event for step in odd for event in step.events]
            return trace  # steps that differ cannot be repeated
        left = steady.left
        for epoch in range(epochs):
            for step in (steady, steady, *odd):
                left = _append_copy(trace, step, first if step is steady else steady, left, again=epoch > 0)
        _append_copy(trace, steady, first, left, again=True)
        return trace


def _append_copy(trace: Trace, step: Step, before: Step, left: list[int], *, again: bool) -> list[int]:
    """Append a copy of a step with new blocks that frees the blocks in `left`, and return the blocks that it leaves.

    `before` is the step that preceded this one when it was traced. A step that runs `again` skips what happens only at
    the first call of a kind.
    """
    freed = dict(zip(before.left, left, strict=True))
    new: dict[int, int] = {}
    for block, size in step.events:
        if (block, size) == EMPTY_CACHE:
            trace.events += [] if again else [EMPTY_CACHE]
        elif size == FREE:
            trace.events.append((new.get(block, freed.get(block, block)), FREE))
        else:
            new[block] = len(trace.uses)
            trace.uses.append(trace.uses[block])
            trace.owners.append(trace.owners[block])
            trace.events.append((new[block], size))
    return [new[block] for block in step.left]


class _Layers:
    """Tells a tracer which layer is running; code between layers belongs to the enclosing module."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.inside = 0  # depth of nested layers
        self.outer: list[str] = []

    @contextmanager
    def on(self, name: str, module: nn.Module) -> Iterator[None]:
        """Watch one module."""
        layer = is_layer(module)

        def enter(*_: Any) -> None:
            self.outer.append(self.tracer.owner)
            self.tracer.owner = self.tracer.owner if self.inside else name
            self.inside += layer

        def leave(*_: Any) -> None:
            self.tracer.owner = self.outer.pop()
            self.inside -= layer

        # always: recomputation under checkpointing ends a forward with an exception as soon as it has what it needs
        handles = (
            module.register_forward_pre_hook(enter),
            module.register_forward_hook(leave, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def _watched(subject: nn.Module, tracer: Tracer, hidden: Set[int]) -> Iterator[None]:
    """Watch all modules but those inside of compiled code, which has no calls of modules."""
    layers = _Layers(tracer)
    with ExitStack() as stack:
        for name, module in named_parts(subject):
            if id(module) not in hidden:
                stack.enter_context(layers.on(name, module))
        yield
