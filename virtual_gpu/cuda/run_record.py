"""The course of a run: phases, optimizer steps, the shapes of their batches, and the peaks of each."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from vramcast.virtual_gpu.cuda.sparse import storage_key
from vramcast.virtual_gpu.tracing.owners import is_layer, named_parts
from vramcast.virtual_gpu.tracing.trace import Use, in_backward

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.script_tracer import ScriptTracer

PHASES = ("loading", "forward", "backward", "optimizer", "evaluation", "generation")


@dataclass(slots=True, eq=False)
class Peak:
    """The highest allocated and reserved bytes of a stretch of a run; stretches with equal figures differ."""

    allocated_bytes: int = 0
    reserved_bytes: int = 0

    def raise_to(self, allocated_bytes: int, reserved_bytes: int) -> None:
        """Note figures after an allocation."""
        self.allocated_bytes = max(self.allocated_bytes, allocated_bytes)
        self.reserved_bytes = max(self.reserved_bytes, reserved_bytes)


@dataclass(slots=True)
class StepRecord:
    """One optimizer step, from the end of the step before."""

    shapes: tuple[tuple[int, ...], ...] = ()
    """Of the tensors that the network was called with first."""
    backward_passes: int = 0
    peak: Peak = field(default_factory=Peak)
    phase: str = "loading"
    """In which its peak was reached."""
    line: str | None = None


@dataclass(frozen=True)
class LayerCall:
    """A layer in the first training pass of its network."""

    name: str
    kind: str
    shape: tuple[int, ...]
    """Of its first output, with the batch."""
    elements: int
    """Of the storages that it brings."""
    parameters: int


class RunRecord:
    """Follows a script by hooks of torch: which network runs, in which phase, and at which step."""

    def __init__(self, tracer: "ScriptTracer") -> None:
        self._tracer = tracer
        self.phase = "loading"
        self.peak = Peak()
        self.by_phase: dict[str, Peak] = {}
        self.windows: list[Peak] = []
        """Peaks of stretches that their readers begin."""
        self.calls: Counter[str] = Counter()
        """How often a network was called in each phase."""
        self.on_trained_call: Callable[[], None] = lambda: None
        self.evaluated_calls = 0
        """How often a network was called without training."""
        self.trained_calls = 0
        """How often a network was called in training."""
        self.optimizer_calls = 0
        """Steps of all optimizers, or iterations of a loop that has none."""
        self.on_optimizer_call: Callable[[], None] = lambda: None
        self.generating = 0
        """How many functions that generate tokens are running."""
        self.made_optimizers: WeakSet[Any] = WeakSet()
        """Optimizers of torch that are alive."""
        self.steps: list[StepRecord] = []
        self.current = StepRecord()
        self.after_step: list[Callable[[], None]] = []
        self.after_stretch: list[Callable[[], None]] = []
        """Called before a network runs and after a step."""
        self.batch_starts: list[tuple[int, int]] = []
        """The step of each batch of the first network that was trained, and the number of events before it."""
        self._shapes: dict[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]] = {}
        self.roots: dict[int, nn.Module] = {}
        """Networks that were called in training, by identity, in the order of their first call."""
        self.evaluated: dict[int, nn.Module] = {}
        """The same for networks of a script that has trained none by then."""
        self.evaluated_shapes: tuple[tuple[int, ...], ...] = ()
        """Shapes of the tensors that the first of them was called with."""
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        self.autocast: torch.dtype | None = None
        self.layers: list[LayerCall] = []
        self._recording_layers = False
        self._counted: set[int] = set()
        self._stacks: dict[int, list[tuple[nn.Module, str]]] = {}
        """For each thread the modules that are running, outermost first, each with the owner before it."""
        self.thread = threading.get_ident()
        """The thread whose networks have phases: the one that trains."""
        self._has_stepped = False
        self._following = threading.Lock()
        self._names: dict[int, dict[int, str]] = {}
        self._layers = 0
        self._in_step = False
        self._step_counts: Counter[int] = Counter()

    def note(self, allocated_bytes: int, reserved_bytes: int) -> None:
        """Note the figures after an allocation."""
        phase = self.phase
        if phase in ("forward", "evaluation") and in_backward():
            phase = self.phase = "backward"
            self.current.backward_passes += 1
        elif phase == "backward" and self._in_step and not in_backward():  # a closure ran inside of the step
            phase = self.phase = "optimizer"
            self._tracer.phase = Use.OPTIMIZER_STATE
        if phase not in self.by_phase:
            self.by_phase[phase] = Peak()
        self.by_phase[phase].raise_to(allocated_bytes, reserved_bytes)
        if allocated_bytes > self.current.peak.allocated_bytes:
            self.current.phase = phase
        self.current.peak.raise_to(allocated_bytes, reserved_bytes)
        self.peak.raise_to(allocated_bytes, reserved_bytes)
        for window in self.windows:
            window.raise_to(allocated_bytes, reserved_bytes)

    def forget_batch(self) -> None:
        """Start the current step anew, after an allocation failed: the script may try a smaller batch."""
        self.current.shapes, self.current.backward_passes = (), 0
        if not self._in_step:
            self.phase = "forward"

    def enter_module(self, module: nn.Module, args: Any) -> bool:
        """Note that a module starts to run; return False in a thread that is not followed."""
        tracer = self._tracer
        with self._following:
            if not self._follows(module):
                return False
            stack = self._stacks.setdefault(self.thread, [])
            stack.append((module, tracer.owner))
        if len(stack) == 1:
            self._layers = 0
            if not in_backward():
                self._start_root(module, args)
        names = self._names.get(id(stack[0][0]), {})
        if not self._layers:
            tracer.owner = names.get(id(module), tracer.owner)
        self._layers += is_layer(module)
        return True

    def _follows(self, module: nn.Module) -> bool:
        """Return True in the thread that trains; before its first step, another may turn out to be the one."""
        thread = threading.get_ident()
        if thread == self.thread:
            return True
        if self._has_stepped or self._stacks.get(self.thread) or not self._is_trained_on_device(module):
            return False  # a network that runs beside the training loop has no phase
        self.thread = thread
        return True

    def _is_trained_on_device(self, module: nn.Module) -> bool:
        return _is_trained(module) and any(map(self._tracer.is_device, module.parameters()))

    @property
    def running(self) -> list[nn.Module]:
        """The modules that are running, outermost first."""
        return [module for module, _ in self._stacks.get(self.thread, ())]

    def leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note that a module has run; the output is None where it failed."""
        stack = self._stacks[threading.get_ident()]
        _, self._tracer.owner = stack.pop()
        self._layers -= is_layer(module)
        if self._recording_layers:
            self._recording_layers = bool(stack)
            self._note_layer(stack[0][0] if stack else module, module, args, output)

    def _note_layer(self, root: nn.Module, module: nn.Module, args: Any, output: Any) -> None:
        if self._layers or not is_layer(module):
            return
        if torch.is_autocast_enabled("cpu"):  # CUDA borrows the CPU's switch, see virtual_gpu/operators/autocast.py
            self.autocast = torch.get_autocast_dtype("cpu")
        tensors = list(_tensors_in(output))
        if tensors:
            inputs = {storage_key(item) for item in _tensors_in(args)}
            fresh = {storage_key(item): item for item in tensors}
            elements = sum(item.numel() for key, item in fresh.items() if key not in inputs)
            own = {id(item): item.numel() for item in module.parameters() if id(item) not in self._counted}
            self._counted |= own.keys()
            name = self._names.get(id(root), {}).get(id(module), "")
            shape = tuple(tensors[0].shape)
            self.layers.append(LayerCall(name, type(module).__name__, shape, elements, sum(own.values())))

    def enter_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Note that the step of an optimizer of torch starts."""
        self.optimizers.setdefault(id(optimizer), optimizer)
        self.begin_step()

    def begin_step(self) -> None:
        """Note that the step of any optimizer starts."""
        self.thread, self._has_stepped = threading.get_ident(), True
        self.phase, self._tracer.phase, self._in_step = "optimizer", Use.OPTIMIZER_STATE, True

    def leave_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Note that the step of an optimizer of torch is over."""
        parameters = [item for group in optimizer.param_groups for item in group["params"]]
        states = [value for item in parameters for value in optimizer.state.get(item, {}).values()]
        self.end_step(optimizer, parameters, [item.grad for item in parameters], states)

    def end_step(
        self, optimizer: Any, parameters: Iterable[Any], gradients: Iterable[Any], states: Iterable[Any]
    ) -> None:
        """Note that the step of any optimizer is over: mark its gradients and states.

        A step counts once for all optimizers of an iteration: the busiest one counts.
        """
        self._tracer.phase, self.phase, self._in_step = Use.ACTIVATIONS, "forward", False
        self._note_update()
        held = ((Use.PARAMETERS, parameters), (Use.GRADIENTS, gradients), (Use.OPTIMIZER_STATE, states))
        for use, values in held:
            for value in values:
                if isinstance(value, Tensor):
                    self._tracer.mark(value, use)
        self._step_counts[id(optimizer)] += 1
        if max(self._step_counts.values()) > len(self.steps):
            self._append_step()

    def _append_step(self) -> None:
        self.steps.append(self.current)
        self.current = StepRecord()
        self._end_stretch()
        for call in self.after_step:
            call()

    def _step_without_optimizer(self) -> None:
        """Count an iteration of a loop that changes its parameters itself, when the next one begins."""
        if self.current.backward_passes and not self._has_stepped and not self.made_optimizers:
            self._note_update()
            self._append_step()

    def _note_update(self) -> None:
        self.optimizer_calls += 1
        self.on_optimizer_call()

    def _end_stretch(self) -> None:
        for call in self.after_stretch:
            call()

    def _start_root(self, module: nn.Module, args: Any) -> None:
        self._end_stretch()
        training = _is_trained(module)
        if training:
            self._step_without_optimizer()
            self.trained_calls += 1
            self.on_trained_call()
        else:
            self.evaluated_calls += 1
        self.phase = "generation" if self.generating else "forward" if training else "evaluation"
        self.calls[self.phase] += 1
        self._tracer.phase = Use.ACTIVATIONS
        if id(module) not in self._names:
            self._names[id(module)] = {id(part): name for name, part in named_parts(module)}
            for part in module.modules():
                for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
                    self._tracer.mark(tensor, Use.PARAMETERS)
        if not training and not self.roots and id(module) not in self.evaluated:
            self.evaluated_shapes = self.evaluated_shapes or tuple(tuple(item.shape) for item in _tensors_in(args))
            self.evaluated[id(module)] = module
            self._recording_layers = True
        if training:
            if not self.roots:
                self.layers.clear()
                self._counted.clear()
            if id(module) not in self.roots:
                self.roots[id(module)] = module
                self._recording_layers = True
            if id(module) == next(iter(self.roots)):
                self.batch_starts.append((len(self.steps), len(self._tracer.trace.events)))
            if not self.current.shapes:
                shapes = tuple(tuple(item.shape) for item in _tensors_in(args))
                self.current.shapes = self._shapes.setdefault(shapes, shapes)  # one object for equal shapes


def _is_trained(module: nn.Module) -> bool:
    return module.training and torch.is_grad_enabled()


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
