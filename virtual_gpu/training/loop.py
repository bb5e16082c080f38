"""The training that each mode of the virtual GPU runs, in the order in which scripts put it on a device.

A mode says what the device is: plain meta tensors (`session`), one rank of several (`distributed/rank_session`), or
CUDA as a network sees it (`cuda/emulated_loop`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vramcast.virtual_gpu.operators.autocast import MetaScaler, autocast
from vramcast.virtual_gpu.tracing.trace import Tracer, Use
from vramcast.virtual_gpu.training.optimizer_in_backward import OptimizerInBackward
from vramcast.virtual_gpu.training.setup import TrainingSetup, parse_call
from vramcast.virtual_gpu.training.step import inference_steps, training_steps
from vramcast.virtual_gpu.training.step import make_optimizer as optimizer_of

MakeInputs = Callable[[int], tuple[Any, ...]]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class TrainingLoop:
    """The training of one network under a tracer.

    Args:
        tracer: Sees what is allocated.
        setup: How the network is trained.
        make_inputs: Returns a batch of a size, the arguments of the network.
        make_optimizer: Replaces the optimizer that the setup names.
    """

    def __init__(
        self, tracer: Tracer, setup: TrainingSetup, make_inputs: MakeInputs, make_optimizer: MakeOptimizer | None = None
    ) -> None:
        self.tracer = tracer
        self.setup = setup
        self.make_inputs = make_inputs
        self._make_optimizer = make_optimizer
        self._dry_run_inputs: tuple[Any, ...] = ()
        self._inputs: tuple[Any, ...] = ()
        self._ahead: list[tuple[Any, ...]] = []
        self._scaler: Any = None

    # What a mode decides

    def owner_of(self, module: nn.Module, tensor: Tensor) -> str:
        """Return the layer that a parameter, a buffer, or what belongs to it, is counted for."""
        return ""

    def default_implementation(self, optimizer: str) -> str:
        """Return the implementation that torch takes on CUDA if none is named; on meta it would take another.

        It is foreach if there is one, except for Adafactor (torch/optim/optimizer.py, _default_to_fused_or_foreach;
        torch/optim/_adafactor.py).
        """
        return "single" if optimizer == "Adafactor" else "foreach"

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        return autocast(self.setup.autocast)() if self.setup.autocast else nullcontext()

    def scaler(self) -> Any:
        """Return the scaler of losses in half precision."""
        return MetaScaler() if self.setup.autocast == "fp16" else None

    def batches(self, size: int) -> Iterator[tuple[Any, ...]]:
        """Yield the batches of a step."""
        for _ in range(self.setup.accumulate):
            yield self.next_batch(size)

    # What all modes share

    def place(self, network: nn.Module) -> None:
        """Allocate in the order of `module.to(device)`: children first, then a module's own parameters and buffers."""
        self.tracer.phase = Use.PARAMETERS
        for module in children_first(network):
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                self.tracer.owner = self.owner_of(module, tensor)
                for part in self.parts_of(tensor.detach()):
                    self.tracer.see(part)
        self.tracer.phase, self.tracer.owner = Use.ACTIVATIONS, ""

    def parts_of(self, tensor: Tensor) -> Iterable[Tensor]:
        """Return the tensors that hold the data of a tensor."""
        return stored_tensors(tensor)

    def batch(self, size: int) -> tuple[Any, ...]:
        """Return a batch on the device."""
        self.tracer.phase = Use.INPUTS
        inputs = self.make_inputs(size)
        self.tracer.phase = Use.ACTIVATIONS
        return inputs

    def next_batch(self, size: int) -> tuple[Any, ...]:
        """Return a batch that lives until the next one is made."""
        self._inputs = ()
        self._inputs = self.batch(size)
        return self._inputs

    def start(self, network: nn.Module) -> None:
        """Take the batches that a loader has ready, and pass a batch forward as scripts do before they train.

        Blocks of the loader's stream cannot be reused on the main stream, so they count as held.
        """
        self._ahead = [self.batch(self.setup.batch_size) for _ in range(self.setup.prefetched_batches)]
        if self.setup.dry_run_batch_size:
            batch = self.batch(self.setup.dry_run_batch_size)
            for _ in range(self.setup.dry_run_passes):
                network(*batch)
            # One pass belongs to a summary, which frees its batch; more belong to a script, which keeps it.
            self._dry_run_inputs = batch if self.setup.dry_run_passes > 1 else ()

    def optimizer(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer, whose steps are a phase of their own; make the scaler, too."""
        trainable = [item for item in parameters if item.requires_grad]
        make = self.optimizer_maker()
        in_backward = self.setup.implementation == "in_backward"
        optimizer = OptimizerInBackward(trainable, make) if in_backward else make(trainable)
        self._scaler = self.scaler()
        return optimizer

    def optimizer_maker(self) -> MakeOptimizer:
        """Return what makes the optimizer of some parameters."""
        name, arguments = parse_call(self.setup.optimizer)
        chosen = self.setup.implementation
        implementation = self.default_implementation(name) if chosen in ("default", "in_backward") else chosen
        make = self._make_optimizer or partial(optimizer_of, name, dict(arguments), implementation)

        return lambda parameters: self.phased(make(parameters))

    def phased(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Let the steps of an optimizer be a phase of their own."""
        optimizer.register_step_pre_hook(lambda *_: self._enter(Use.OPTIMIZER_STATE))
        optimizer.register_step_post_hook(lambda *_: self._enter(Use.ACTIVATIONS))
        return optimizer

    def _enter(self, phase: Use) -> None:
        self.tracer.phase = phase

    def steps(self, network: Any, optimizer: Any, sizes: Sequence[int]) -> Iterator[Any]:
        """Run a step for each size of a batch, and yield losses; without training, outputs."""
        setup = self.setup
        batches = map(self.batches, sizes)
        if not setup.is_training:
            gradients_off = torch.no_grad if setup.mode == "evaluation" else torch.inference_mode
            return inference_steps(network, batches, gradients_off, self.autocast)
        return training_steps(network, optimizer, batches, setup.loss, self.autocast, self._scaler, setup.zero_grad)

    def mark_uses(self, network: nn.Module, states: Any) -> None:
        """Mark gradients and optimizer state, which can be identified only after a step."""
        for module in network.modules():
            for parameter in module.parameters(recurse=False):
                state = [value for value in states.get(parameter, {}).values() if isinstance(value, Tensor)]
                gradients = [] if parameter.grad is None else [parameter.grad]
                for use, tensors in ((Use.OPTIMIZER_STATE, state), (Use.GRADIENTS, gradients)):
                    self._mark(use, tensors, self.owner_of(module, parameter))

    def _mark(self, use: Use, tensors: Sequence[Tensor], owner: str) -> None:
        trace = self.tracer.trace
        for tensor in tensors:
            block = self.tracer.block_of(tensor)
            if block is not None:
                trace.uses[block], trace.owners[block] = use, owner


def children_first(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a network in the order in which `module.to(device)` moves them."""
    for child in module.children():
        yield from children_first(child)
    yield module


def stored_tensors(tensor: Any) -> Iterator[Tensor]:
    """Yield the tensors that hold the data of a tensor: a quantised weight of torchao wraps several."""
    names = (
        tensor.__tensor_flatten__()[0] if type(tensor) is not Tensor and hasattr(tensor, "__tensor_flatten__") else ()
    )
    if not names:
        yield tensor
    for name in names:
        yield from stored_tensors(getattr(tensor, name))
