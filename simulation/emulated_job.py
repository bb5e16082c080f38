"""A job that plain meta tensors cannot run: its training loop runs on a virtual GPU that the network sees as CUDA.

`.cuda()` in a forward, numbers read from tensors, data-dependent shapes, packed sequences, streams and sparse gradients
work there; values that are not known are assumed, and the assumptions are part of the simulation's notes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from vramcast.errors import UserError
from vramcast.jobs.batches import input_shapes
from vramcast.jobs.inference import inference_call, inference_facts
from vramcast.jobs.job import ModuleJob
from vramcast.jobs.keras_networks import build_variables
from vramcast.jobs.liger_library import liger_kernels, liger_release
from vramcast.jobs.optimizers import OWN, factory_of, optimizer_facts
from vramcast.jobs.steps import BatchCall, LossCall, trainer_step
from vramcast.jobs.subject import batch_in_channels_last, in_channels_last
from vramcast.simulation.emulated_simulation import simulation_of_run
from vramcast.simulation.library_versions import library_versions
from vramcast.simulation.replays import Replays
from vramcast.simulation.result import Simulation
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.compiled.networks import compiled_parts
from vramcast.virtual_gpu.compiled.releases import is_supported, unknown_release
from vramcast.virtual_gpu.cuda.emulation import CudaEmulation
from vramcast.virtual_gpu.cuda.run_record import StepRecord
from vramcast.virtual_gpu.measurement import Status
from vramcast.virtual_gpu.operators.contiguity import suggested_layout
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.replay.simulate import measurement_of, replay_on
from vramcast.virtual_gpu.tracing.trace import Trace, Tracer, Use
from vramcast.virtual_gpu.training.loop import MakeInputs, MakeOptimizer, TrainingLoop
from vramcast.virtual_gpu.training.setup import TrainingSetup
from vramcast.virtual_gpu.training.step import DTYPES

_GENERATIONS = 1
"""Calls of `generate`, each of which frees its cache."""
_EPOCHS = 2
"""With an odd last batch; the steps of equal batches are alike, and `ModuleJob.steps` of them are enough."""


class _EmulatedLoop(TrainingLoop):
    """The training of a module that sees CUDA: torch itself chooses implementations, and the record marks uses."""

    def __init__(
        self, tracer: Tracer, setup: TrainingSetup, make_inputs: MakeInputs, make_optimizer: MakeOptimizer | None
    ) -> None:
        super().__init__(tracer, replace(setup, loss="own"), make_inputs, make_optimizer)

    def default_implementation(self, optimizer: str) -> str:
        """Leave the choice to torch."""
        return "default"

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        dtype = self.setup.autocast
        return torch.autocast("cuda", DTYPES[dtype]) if dtype else nullcontext()

    def scaler(self) -> Any:
        """Return the scaler of losses in half precision."""
        return torch.amp.GradScaler("cuda") if self.setup.autocast == "fp16" else None

    def parts_of(self, tensor: Tensor) -> Iterable[Tensor]:
        """Return the tensor: the tracer looks into wrappers."""
        return [tensor]

    def phased(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return an optimizer as it is: the record sees its steps."""
        return optimizer

    def sizes(self, count: int) -> list[int]:
        """Return the sizes of batches, one for each step."""
        full, last = self.setup.batch_size, self.setup.last_batch_size
        return [full] * count if last is None else [full, full, *[full, full, last] * _EPOCHS, full]


class EmulatedJob:
    """A module and its training on a virtual GPU, run once for the first of some devices."""

    def __init__(self, job: ModuleJob, training: TrainingSetup, profile: DeviceProfile) -> None:
        if training.liger:
            liger_release()  # an absent library fails before the network is built
        self.training = training
        self.profile = profile
        self._inputs: tuple[Mapping[str, Any], ...] = ()
        self._traced_with: Mapping[str, str] = library_versions(job.module)
        drawn = job.batch.notes(training.batch_size)  # before the loop: drawing is not part of the job
        self._notes = (*inference_facts(training), *drawn, *optimizer_facts(training.optimizer))
        module = None if job.rebuild is not None else self._copied(job)
        self._gpu = CudaEmulation(
            profile, options=AllocatorOptions(), unbounded=True, nonzero_fraction=job.nonzero_fraction
        )
        with self._gpu, ExitStack() as stack, torch.backends.cudnn.flags(benchmark=training.cudnn_benchmark):
            if training.liger:
                kernels = stack.enter_context(liger_kernels(module, training.liger))
                self._traced_with = {**self._traced_with, **kernels}
            self._train(job, module)

    @property
    def trace(self) -> Trace:
        """The events of the training loop."""
        return self._gpu.tracer.trace

    @property
    def steps(self) -> Sequence[StepRecord]:
        """The optimizer steps of the training loop, with their peaks."""
        return self._gpu.record.steps

    def simulation(self, profiles: Sequence[DeviceProfile]) -> Simulation:
        """Return the simulation on some devices, of which the first is the one that the loop ran on."""
        gpu = self._gpu
        others = (self.profile, *profiles)
        simulation = simulation_of_run(gpu, others, Replays(gpu.options), batch_size=self.training.batch_size)
        table, optimizer = simulation.table, simulation.training.optimizer
        if not self.training.is_training:
            table, optimizer = replace(table, trainable_shapes=()), self.training.optimizer
        return replace(
            simulation,
            table=table,
            peaks={**simulation.peaks, self.profile.name: self._peaks(simulation)},
            training=replace(self.training, optimizer=optimizer, loss="own"),
            notes=(*map(str, gpu.assumptions.all()), *self._notes),
            inputs=self._inputs,
            traced_with={**simulation.traced_with, **self._traced_with},
        )

    def _peaks(self, simulation: Simulation) -> Any:
        """Return the peaks on the first device: the loop itself ran without a memory limit."""
        peaks = simulation.peaks[self.profile.name]
        lowered, replayed = replay_on(self.trace, self.profile, self._gpu.options)
        if replayed.oom_event is None and replayed.peak_reserved_bytes < (peaks.bounded.reserved_bytes or 0):
            return replace(peaks, bounded=measurement_of(self.trace, self.profile, lowered, replayed))
        if replayed.oom_event is None:
            return peaks
        oom = replace(peaks.bounded, status=Status.OOM, evidence=replayed.oom_message)
        return replace(peaks, bounded=oom)

    def _train(self, job: ModuleJob, copied: nn.Module | None) -> None:
        module = copied or self._rebuilt(job, job.rebuild)  # type: ignore[arg-type]
        loop = _EmulatedLoop(
            self._gpu.tracer, self.training, partial(self._batch, job), _maker(job, module, self.training)
        )
        if copied is not None:
            loop.place(copied)
        if not self.training.is_training:
            self._infer(job, module, loop)
            return
        network = LossCall(module, job.step)
        loop.start(network if job.step else BatchCall(module))
        with self._compiled(network):
            optimizer = loop.optimizer(list(module.parameters()))
            for _ in loop.steps(network, optimizer, loop.sizes(job.steps)):
                pass

    def _infer(self, job: ModuleJob, module: nn.Module, loop: "_EmulatedLoop") -> None:
        """Run a few batches without gradients; a generation is long, and its second has the blocks of its first."""
        run = inference_call(module.eval(), self.training, job.step)
        for _ in loop.steps(run, None, loop.sizes(_GENERATIONS if self.training.mode == "generate" else job.steps)):
            pass

    def _compiled(self, network: nn.Module) -> AbstractContextManager[Any]:
        """Return the context in which the parts of a network are compiled that the training names."""
        if not self.training.is_compiled:
            return nullcontext()
        if not is_supported():
            self._gpu.assumptions.note_once(unknown_release())
            return nullcontext()
        session = self._gpu.compiler()
        session.memory_budget = self.training.memory_budget
        return compiled_parts(session, network, self.training)

    def _rebuilt(self, job: ModuleJob, make: Callable[[], nn.Module]) -> nn.Module:
        """Make the module again, on the device that it chooses: the virtual GPU."""
        setup = self.training
        others = setup.parallel or setup.checkpointing or setup.liger or setup.channels_last
        if others or setup.loss_form != "default" or setup.dtype != job.dtype:
            raise UserError(
                "expected a Keras network as its file builds it, found --parallel, --checkpointing, --liger, "
                "--channels-last, --loss-form or another --dtype: drop them, and set the dtype policy in the file"
            )
        self._gpu.tracer.phase = Use.PARAMETERS
        module = make().train()
        self._gpu.tracer.phase = Use.ACTIVATIONS
        build_variables(module, self._batch(job, setup.batch_size)[0])
        return module

    def _copied(self, job: ModuleJob) -> nn.Module:
        module, facts = job.copy_for(self.training)
        self._notes = (*self._notes, *facts)
        self._traced_with = library_versions(module)  # with the library of the adapter
        _attach_trainer(module)
        return in_channels_last(module) if self.training.channels_last else module

    def _batch(self, job: ModuleJob, size: int) -> tuple[Any]:
        batch = job.batch.with_values(size)
        self._inputs = input_shapes(batch)
        return (self._moved(job, batch),)

    def _moved(self, job: ModuleJob, batch: Any) -> Any:
        """Return a batch on the device; transformers would drop a mask of ones (masking_utils)."""
        if self.training.channels_last:
            batch = batch_in_channels_last(batch)
        if not job.masks or not isinstance(batch, tuple):
            return tree_map_only(Tensor, self._on_device, batch)
        return tuple(
            torch.zeros(item.shape, dtype=item.dtype, device="cuda") if place in job.masks else self._on_device(item)
            for place, item in enumerate(batch)
        )

    def _on_device(self, tensor: Tensor) -> Tensor:
        is_number = tensor.dtype in DTYPES.values()
        dtype = DTYPES[self.training.dtype] if is_number else tensor.dtype
        if tensor.device.type == "meta":
            if not is_number:
                return torch.ones(tensor.shape, dtype=dtype, device="cuda")
            return torch.empty(tensor.shape, dtype=dtype, device="cuda", memory_format=suggested_layout(tensor))
        return tensor.to("cuda", dtype)


def _maker(job: ModuleJob, module: nn.Module, setup: TrainingSetup) -> MakeOptimizer | None:
    """Return what makes the job's own optimizer, or one of a library; None for one of torch.optim."""
    configure = job.optimizer
    if setup.optimizer == OWN and configure is not None:
        return lambda _: configure(module)
    return factory_of(setup.optimizer, module if job.step is trainer_step else None)


def _attach_trainer(module: nn.Module) -> None:
    """Give a LightningModule what its step may ask of a trainer: it trains alone, in the first epoch."""
    if hasattr(module, "_trainer") and getattr(module, "_trainer", None) is None:
        trainer = SimpleNamespace(
            global_step=0, current_epoch=0, max_epochs=1, max_steps=-1, world_size=1, global_rank=0, local_rank=0,
            num_devices=1, training=True, validating=False, sanity_checking=False, is_global_zero=True,
            is_last_batch=False, num_training_batches=1, estimated_stepping_batches=1, accumulate_grad_batches=1,
            logger=None, loggers=[], callback_metrics={}, logged_metrics={}, barebones=False,
        )  # fmt: skip
        module._trainer = trainer  # type: ignore[assignment]
        module.log = module.log_dict = lambda *args, **kwargs: None  # type: ignore[assignment]
