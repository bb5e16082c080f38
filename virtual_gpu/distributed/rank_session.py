"""A training run of one rank as a trace: torch.distributed wraps the network and runs its steps on the meta device."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from vramcast.errors import UserError
from vramcast.virtual_gpu.compiled.networks import compiled_network
from vramcast.virtual_gpu.distributed.local_optimizer import ELEMENTWISE, LocalOptimizer
from vramcast.virtual_gpu.distributed.parallelism import MODELLED, Parallelism
from vramcast.virtual_gpu.distributed.pipeline import Pipeline
from vramcast.virtual_gpu.distributed.rank_context import rank_context
from vramcast.virtual_gpu.distributed.rank_tracer import RankTracer, local_tensor
from vramcast.virtual_gpu.distributed.stages import stage_of
from vramcast.virtual_gpu.distributed.strategies import parallel_optimizer, parallelize, pipeline_group
from vramcast.virtual_gpu.distributed.zero_stages import ZeroStage
from vramcast.virtual_gpu.operators.kernels import cuda_kernels
from vramcast.virtual_gpu.tracing.trace import Trace, Use
from vramcast.virtual_gpu.training.loop import MakeInputs, MakeOptimizer, TrainingLoop
from vramcast.virtual_gpu.training.setup import TrainingSetup, parse_call
from vramcast.virtual_gpu.training.step import DTYPES

FULL_STEPS = 3
"""Steps with the full batch. DDP rebuilds its buckets after the first, and the optimizer's state is there from the
second on."""


def trace_rank(
    subject: nn.Module,
    make_inputs: MakeInputs,
    setup: TrainingSetup,
    parallelism: Parallelism,
    rank: int = 0,
    compute_capability: float = 8.0,
    make_optimizer: MakeOptimizer | None = None,
) -> Trace:
    """Trace the training of one rank. Patches are global: one rank at a time per process.

    Args:
        subject: The network on the meta device, in training mode, or a module that holds it as `subject` and computes
            a loss around it. The network is wrapped in place.
        make_inputs: Returns a batch of a size; the size is that of one rank.
        setup: How the subject is trained. `autocast` becomes the mixed precision of FSDP.
        parallelism: The strategy and its degrees.
        rank: The rank to trace.
        compute_capability: Decides which CUDA kernels run.
        make_optimizer: Replaces the optimizer that the setup names.
    """
    return _RankRun(subject, make_inputs, setup, parallelism, rank, compute_capability, make_optimizer).trace()


class _RankRun(TrainingLoop):
    """The steps of one rank under a tracer."""

    def __init__(
        self,
        subject: nn.Module,
        make_inputs: MakeInputs,
        setup: TrainingSetup,
        parallelism: Parallelism,
        rank: int,
        compute_capability: float,
        make_optimizer: MakeOptimizer | None,
    ) -> None:
        tracer = RankTracer(cuda_kernels(), cudnn_benchmark=setup.cudnn_benchmark)
        super().__init__(tracer, setup, make_inputs, make_optimizer)
        self.rank_tracer = tracer
        self.subject = subject
        self.parallelism = parallelism
        self.rank = rank
        self.compute_capability = compute_capability
        self.names = _owner_names(subject)
        self.pipeline: Pipeline | None = None
        self.zero: ZeroStage | None = None
        self._shards = parallelism.strategy in ("fsdp1", "fsdp2", "hsdp")
        """FSDP casts parameters itself."""
        self._wrapped_network: Any = None

    def owner_of(self, module: nn.Module, tensor: Tensor) -> str:
        """Return the name of the module that had the parameter before the network was wrapped."""
        return self.names.get(id(tensor), "")

    def parts_of(self, tensor: Tensor) -> Iterable[Tensor]:
        """Return the part of this rank, unless it is in host memory."""
        local = local_tensor(tensor)
        return [local] if local.is_meta else []

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        return nullcontext() if self._shards else super().autocast()

    def scaler(self) -> Any:
        """Return the scaler of losses in half precision."""
        return None if self._shards else super().scaler()

    def batches(self, size: int) -> Iterator[tuple[Any, ...]]:
        """Yield the batches of one step. Under FSDP1 gradients are reduced after the last one, as in accelerate."""
        for left in reversed(range(self.setup.accumulate)):
            later = left and self.parallelism.strategy == "fsdp1"
            with self._wrapped_network.no_sync() if later else nullcontext():
                yield self.batch(size)

    def trace(self) -> Trace:
        """Wrap the network, run its steps and return the trace."""
        with (
            rank_context(self.rank_tracer, self.rank, self.parallelism.world_size, self.compute_capability),
            compiled_network(self.tracer, self.subject, self.setup),
        ):
            network = self._wrapped()
            with self.tracer:
                optimizer = self._rank_optimizer(network)
                for _ in self._rank_steps(network, optimizer):
                    if self.zero is None:  # its blocks are allocated with their use
                        local = getattr(optimizer, "optim", optimizer)  # the local part of ZeroRedundancyOptimizer
                        self.mark_uses(network, local.state)
            trace = self.tracer.trace
            trace.events = list(trace.events)  # a copy: the end of the run frees the network, and is not part of it
            trace.approximations.update(self.parallelism.notes)
            trace.world_size = self.parallelism.world_size
            return trace

    def _wrapped(self) -> nn.Module:
        """Place the parameters and wrap the network.

        Sharded networks are created on meta and get memory for their shards alone. DDP and FSDP1 wrap a network that
        is on the device already, unit by unit in the case of FSDP1.
        """
        strategy, network = self.parallelism.strategy, _network_of(self.subject)
        if strategy in MODELLED:
            self.zero = ZeroStage(network, self.parallelism, self.setup, self.rank_tracer)
            with self.tracer:
                self.zero.place()
            return self.subject
        if strategy in ("fsdp1", "ddp", "zero1"):
            if strategy != "fsdp1":
                self.place(network)
            self.tracer.phase = Use.PARAMETERS if strategy == "fsdp1" else Use.GRADIENTS
            with self.tracer:
                network = parallelize(network, self.parallelism, self.setup, self.rank_tracer)
            self.tracer.phase = Use.ACTIVATIONS
            return self._around(network)
        with RankTracer({}):  # collectives need no data; the full parameters never exist on a device
            if self.parallelism.pipeline > 1:
                network = self.subject = self._make_pipeline(network)
            if strategy != "pp":
                network = parallelize(network, self.parallelism, self.setup, self.rank_tracer)
            if self.parallelism.offload:
                _move_to_host(network)
        self.place(network)
        return self._around(network)

    def _around(self, network: nn.Module) -> nn.Module:
        """Return the module that the training loop calls: the wrapped network, or the loss around it."""
        if _network_of(self.subject) is self.subject:
            return network
        self.subject.subject = network
        return self.subject

    def _make_pipeline(self, network: nn.Module) -> nn.Module:
        """Cut out the stage of this rank; stages are consecutive groups of the ranks that shard one."""
        index = self.rank // self.parallelism.data
        stage = stage_of(network, index, self.parallelism.pipeline)
        group = pipeline_group(self.parallelism)
        self.pipeline = Pipeline(stage, self.parallelism, self.setup.loss, group)
        dtype = self.setup.autocast if self.parallelism.strategy != "pp" else None
        self.pipeline.prepare(self.make_inputs, self._sizes, DTYPES[dtype] if dtype else None)
        return stage

    def _rank_optimizer(self, network: nn.Module) -> Any:
        parameters = [item for item in network.parameters() if item.requires_grad]
        if self.parallelism.offload and self.zero is None:
            return _HostOptimizer(parameters)
        make = self.optimizer_maker()
        self._scaler = self.scaler()
        if self.zero is not None:
            return self.zero.optimizer(make)
        name = parse_call(self.setup.optimizer)[0]
        if (
            self.parallelism.strategy in ("fsdp2", "hsdp", "tp")
            and self._make_optimizer is None
            and name in ELEMENTWISE
        ):
            return LocalOptimizer(make, parameters)
        return parallel_optimizer(make, parameters, self.parallelism)

    @property
    def _sizes(self) -> list[int]:
        setup = self.setup
        odd = [setup.last_batch_size, setup.batch_size] if setup.last_batch_size else []
        return [setup.batch_size] * FULL_STEPS + odd

    def _rank_steps(self, network: nn.Module, optimizer: Any) -> Iterator[Any]:
        setup = self.setup
        if (self.zero is not None or self.pipeline is not None) and setup.zero_grad != "before_forward":
            raise UserError(
                f"expected zero_grad=before_forward with {self.parallelism.strategy}, whose engine drops gradients "
                f"itself, found {setup.zero_grad}: leave it out"
            )
        if self.zero is not None:
            return self.zero.steps(self.batch, optimizer, self._sizes, setup, network, nullcontext)
        if self.pipeline is not None:
            return self.pipeline.steps(self.batch, optimizer, self._sizes, self.autocast)
        self._wrapped_network = _network_of(network)
        return self.steps(network, optimizer, self._sizes)


class _HostOptimizer(torch.optim.Optimizer):
    """An optimizer whose parameters, gradients and state are in host memory: a step takes nothing from the device."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> Any:
        """Do nothing."""


def _network_of(subject: nn.Module) -> nn.Module:
    """Return the network to wrap. A module that holds a network as `subject` computes a loss around it."""
    inner = getattr(subject, "subject", None)
    return inner if isinstance(inner, nn.Module) else subject


def _move_to_host(network: nn.Module) -> None:
    """Put sharded parameters into host memory that is never written; buffers stay on the device."""
    buffers = [
        (module, name, buffer)
        for module in network.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]  # fmt: skip
    network.to_empty(device="cpu")
    for module, name, buffer in buffers:
        module._buffers[name] = buffer


def _owner_names(network: nn.Module) -> dict[int, str]:
    """Return the name of the module of each parameter and buffer."""
    return {
        id(tensor): name
        for name, module in network.named_modules()
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    }
