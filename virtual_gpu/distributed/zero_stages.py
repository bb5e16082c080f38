"""DeepSpeed ZeRO stages 2 and 3, modelled by their documented rules: DeepSpeed's own code does not run here.

Sources: deepspeed/runtime/zero/stage_1_and_2.py, stage3.py and config.py (0.14), and the configuration reference of
DeepSpeed. A rank holds

* parameters in the training dtype: all of them in one flat buffer (stage 2), or a 1/N partition and at most
  `stage3_max_live_parameters` gathered ones (stage 3),
* fp32 master parameters and optimizer state: a 1/N partition, allocated before the first step; in host memory with
  offload,
* gradients in the training dtype: a 1/N partition; each gradient is copied into a bucket and freed as soon as autograd
  has it. Buckets have `reduce_bucket_size` elements, two of them, for the time of the backward pass,
* an fp32 copy of its gradient partition during the step.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from vramcast.virtual_gpu.distributed.parallelism import Parallelism
from vramcast.virtual_gpu.distributed.rank_tracer import RankTracer
from vramcast.virtual_gpu.tracing.trace import Use
from vramcast.virtual_gpu.training.setup import TrainingSetup
from vramcast.virtual_gpu.training.step import DTYPES, loss_of

REDUCE_BUCKET_ELEMENTS = 500_000_000
"""zero_optimization.reduce_bucket_size; transformers sets it to hidden_size ** 2 ("auto")."""
MAX_LIVE_ELEMENTS = 1_000_000_000
"""zero_optimization.stage3_max_live_parameters."""
BUCKETS = 2
"""One is filled while the other is reduced (overlap_comm)."""


class ZeroStage:
    """The memory of one rank under ZeRO stage 2 or 3, around a plain training step. Changes the network's dtype."""

    def __init__(self, network: nn.Module, parallelism: Parallelism, setup: TrainingSetup, tracer: RankTracer) -> None:
        self.network = network
        self.parallelism = parallelism
        self.tracer = tracer
        self.dtype = DTYPES[setup.autocast or setup.dtype]
        network.to(self.dtype)
        self.elements = sum(item.numel() for item in network.parameters())
        self.trainable = sum(item.numel() for item in network.parameters() if item.requires_grad)
        self.partition = -(-self.trainable // parallelism.world_size)
        self.bucket = _bucket_elements(network)
        self.held: list[Tensor] = []

    def place(self) -> None:
        """Allocate what a rank holds for the whole run."""
        full = self.parallelism.strategy == "zero2"
        shard = -(-self.elements // self.parallelism.world_size)
        self._hold(Use.PARAMETERS, self.elements if full else shard, self.dtype)
        if not full:
            self._hold(Use.PARAMETERS, min(self.elements, MAX_LIVE_ELEMENTS), self.dtype)
        if not self.parallelism.offload:
            self._hold(Use.PARAMETERS, self.partition, torch.float32)
        for buffer in self.network.buffers():
            self.tracer.see(buffer)
        for parameter in self.network.parameters():
            self.tracer.ignore(parameter)  # a view of the flat buffer, or gathered
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]

    def _hold(self, use: Use, elements: int, dtype: torch.dtype) -> None:
        self.held.append(self._allocate(use, elements, dtype))

    def _allocate(self, use: Use, elements: int, dtype: torch.dtype) -> Tensor:
        phase, self.tracer.phase = self.tracer.phase, use
        tensor = torch.empty(elements, dtype=dtype, device="meta")
        self.tracer.phase = phase
        return tensor

    def optimizer(self, make: Callable[[list[Any]], torch.optim.Optimizer]) -> torch.optim.Optimizer | None:
        """Return the optimizer of the fp32 partition, after the first step that allocates its state; None on a host."""
        if self.parallelism.offload:
            return None
        shard = nn.Parameter(self.held[-1])
        optimizer = make([shard])
        self._step(optimizer)
        return optimizer

    def steps(
        self,
        make_batch: Callable[[int], tuple[Any, ...]],
        optimizer: torch.optim.Optimizer | None,
        sizes: Sequence[int],
        setup: TrainingSetup,
        subject: nn.Module,
        context: Callable[[], AbstractContextManager[Any]],
    ) -> Iterator[None]:
        """Run the training steps."""
        for size in sizes:
            gradients = None
            for _ in range(setup.accumulate):
                with context():
                    output = subject(*make_batch(size))
                    value = loss_of(setup.loss, output)
                buckets = [self._allocate(Use.GRADIENTS, self.bucket, self.dtype) for _ in range(BUCKETS)]
                if gradients is None and not self.parallelism.offload:
                    gradients = self._allocate(Use.GRADIENTS, self.partition, self.dtype)
                value.backward()  # type: ignore[no-untyped-call]
                del buckets
            if optimizer is not None:
                self._step(optimizer)
            del gradients
            yield

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        (shard,) = optimizer.param_groups[0]["params"]
        shard.grad = self._allocate(Use.GRADIENTS, self.partition, torch.float32)
        optimizer.step()
        shard.grad = None


def _drop_gradient(parameter: Tensor) -> None:
    """Free a gradient: it was copied into a bucket."""
    parameter.grad = None


def _bucket_elements(network: nn.Module) -> int:
    for module in network.modules():
        hidden = getattr(getattr(module, "config", None), "hidden_size", None)
        if isinstance(hidden, int):
            return hidden**2
    return REDUCE_BUCKET_ELEMENTS
