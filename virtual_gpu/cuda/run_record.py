"""The course of a run: phases, optimizer steps, the shapes of their batches, and the peaks of each."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vramcast.virtual_gpu.owners import is_layer
from vramcast.virtual_gpu.trace import Use, in_backward

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.live_tracer import LiveTracer

PHASES = ("loading", "forward", "backward", "optimizer", "evaluation")


@dataclass
class Peak:
    """The highest allocated and reserved bytes of a stretch of a run."""

    allocated_bytes: int = 0
    reserved_bytes: int = 0

    def raise_to(self, allocated_bytes: int, reserved_bytes: int) -> None:
        """Note figures after an allocation."""
        self.allocated_bytes = max(self.allocated_bytes, allocated_bytes)
        self.reserved_bytes = max(self.reserved_bytes, reserved_bytes)


@dataclass
class StepRecord:
    """One optimizer step, from the end of the step before."""

    shapes: tuple[tuple[int, ...], ...] = ()
    """Of the tensors that the network was called with first."""
    backward_passes: int = 0
    peak: Peak = field(default_factory=Peak)
    phase: str = "loading"
    """In which its peak was reached."""
    line: str | None = None


class RunRecord:
    """Follows a script by hooks of torch: which network runs, in which phase, and at which step."""

    def __init__(self, tracer: "LiveTracer") -> None:
        self._tracer = tracer
        self.phase = "loading"
        self.peak = Peak()
        self.by_phase: dict[str, Peak] = {}
        self.steps: list[StepRecord] = []
        self.current = StepRecord()
        self.after_step: list[Callable[[], None]] = []
        self.roots: dict[int, nn.Module] = {}
        """Networks that were called in training, by identity, in the order of their first call."""
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        self.autocast: torch.dtype | None = None
        self._stack: list[tuple[nn.Module, str]] = []
        self._names: dict[int, dict[int, str]] = {}
        self._layers = 0
        self._step_counts: Counter[int] = Counter()

    def note(self, allocated_bytes: int, reserved_bytes: int) -> None:
        """Note the figures after an allocation."""
        phase = self.phase
        if phase == "forward" and in_backward():
            phase = self.phase = "backward"
            self.current.backward_passes += 1
        if phase not in self.by_phase:
            self.by_phase[phase] = Peak()
        self.by_phase[phase].raise_to(allocated_bytes, reserved_bytes)
        if allocated_bytes > self.current.peak.allocated_bytes:
            self.current.phase = phase
        self.current.peak.raise_to(allocated_bytes, reserved_bytes)
        self.peak.raise_to(allocated_bytes, reserved_bytes)

    def enter_module(self, module: nn.Module, args: Any) -> None:
        """Note that a module starts to run."""
        if not self._stack and not in_backward():
            self._start_root(module, args)
        tracer = self._tracer
        self._stack.append((module, tracer.owner))
        names = self._names.get(id(self._stack[0][0]), {})
        if not self._layers:
            tracer.owner = names.get(id(module), tracer.owner)
        self._layers += is_layer(module)

    def leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note that a module has run, or has failed."""
        while self._stack:  # a module whose hook was skipped by an exception leaves with its parent
            last, owner = self._stack.pop()
            self._layers -= is_layer(last)
            self._tracer.owner = owner
            if last is module:
                return

    def enter_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Note that an optimizer's step starts."""
        self.phase, self._tracer.phase = "optimizer", Use.OPTIMIZER_STATE
        self.optimizers.setdefault(id(optimizer), optimizer)

    def leave_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Note that an optimizer's step is over, and tell gradients and states from other blocks."""
        self._tracer.phase, self.phase = Use.ACTIVATIONS, "forward"
        mark = self._tracer.mark
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                mark(parameter, Use.PARAMETERS)
                if parameter.grad is not None:
                    mark(parameter.grad, Use.GRADIENTS)
                for value in optimizer.state.get(parameter, {}).values():
                    if isinstance(value, Tensor):
                        mark(value, Use.OPTIMIZER_STATE)
        self._end_step(optimizer)

    def _end_step(self, optimizer: Any) -> None:
        """Count a step once for all optimizers of an iteration: the busiest one counts."""
        self._step_counts[id(optimizer)] += 1
        if max(self._step_counts.values()) > len(self.steps):
            self.steps.append(self.current)
            self.current = StepRecord()
            for call in self.after_step:
                call()

    def _start_root(self, module: nn.Module, args: Any) -> None:
        training = module.training and torch.is_grad_enabled()
        self.phase = "forward" if module.training else "evaluation"
        if id(module) not in self._names:
            self._names[id(module)] = {id(part): name for name, part in module.named_modules()}
            for part in module.modules():
                for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
                    self._tracer.mark(tensor, Use.PARAMETERS)
        if training:
            self.roots.setdefault(id(module), module)
            if torch.is_autocast_enabled("cpu"):
                self.autocast = torch.get_autocast_dtype("cpu")
            if not self.current.shapes:
                self.current.shapes = _shapes(args)


def _shapes(args: Any) -> tuple[tuple[int, ...], ...]:
    shapes: list[tuple[int, ...]] = []
    for value in args.values() if isinstance(args, dict) else args:
        if isinstance(value, Tensor):
            shapes.append(tuple(value.shape))
        elif isinstance(value, (list, tuple, dict)):
            shapes += _shapes(value)
    return tuple(shapes)
