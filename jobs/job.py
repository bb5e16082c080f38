"""Jobs: a subject with its inputs, loss and optimizer, which can be prepared for any training setup."""

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from vramcast.errors import UserError
from vramcast.jobs.analysis.layers import detailed_table, layer_table
from vramcast.jobs.batches import Batches, MakeBatch
from vramcast.jobs.checkpointing import enable_checkpointing
from vramcast.jobs.families import FAMILIES
from vramcast.jobs.families.external import build_external
from vramcast.jobs.families.meta_device import copy_to_meta
from vramcast.jobs.filters import Rejected, check
from vramcast.jobs.finetuning.finetuned import with_finetuning
from vramcast.jobs.language_losses import use_loss_form
from vramcast.jobs.optimizers import DEFAULT, OWN, OptimizerOf, factory_of, optimizer_facts, parse_optimizer
from vramcast.jobs.spec import LayerTable, Spec
from vramcast.jobs.steps import BatchCall, LossCall, TrainingStep, builtin_loss, trainer_step
from vramcast.jobs.subject import subject_of
from vramcast.virtual_gpu.canonical import canonical_json
from vramcast.virtual_gpu.operators.shapes import SHAPES
from vramcast.virtual_gpu.tracing.source_lines import place_now
from vramcast.virtual_gpu.tracing.trace import without_data
from vramcast.virtual_gpu.training.loop import MakeInputs, MakeOptimizer
from vramcast.virtual_gpu.training.setup import NO_OPTIMIZER, TrainingSetup
from vramcast.virtual_gpu.training.step import DTYPES, random_inputs

TABLE_BATCH = 2
"""Batch size for layer tables: a norm in training mode needs more than one sample."""


@dataclass(frozen=True)
class PreparedJob:
    """A job under one training setup, ready to be traced."""

    subject: nn.Module
    """On the meta device, in training mode."""
    make_inputs: MakeInputs
    training: TrainingSetup
    """The setup, with the loss that the network decides."""
    make_optimizer: MakeOptimizer | None = None
    """Overrides the optimizer that the setup names."""
    assumptions: tuple[str, ...] = ()
    """About its inputs."""
    facts: tuple[str, ...] = ()
    """Statements of an answer that rest on no assumption, such as state that is not on the device."""


class Job(ABC):
    """A subject that can be trained in several ways."""

    family: str
    places: Mapping[str, str] = MappingProxyType({})
    """Source lines of the network by the approximation that was made for them."""

    @abstractmethod
    def table(self, training: TrainingSetup | None = None) -> LayerTable:
        """Return the layers of the network, with the adapter of a setup if it has one."""

    def details(self, training: TrainingSetup) -> LayerTable:
        """Return the layers with all fields that a forward pass can tell; those of `table` if it tells no more."""
        return self.table(training)

    @abstractmethod
    def setup(self, options: Mapping[str, Any]) -> TrainingSetup:
        """Return a training setup with these options; options that are None keep the job's own value."""

    @abstractmethod
    def prepare(self, training: TrainingSetup) -> PreparedJob:
        """Build the subject for a setup."""


class SpecJob(Job):
    """The network of a spec. `table` is its layer table where the caller has it already."""

    def __init__(self, spec: Spec, table: LayerTable | None = None) -> None:
        self.spec = spec
        self.family = spec.family
        self._table = table

    def table(self, training: TrainingSetup | None = None) -> LayerTable:
        """Return the filter's table for generated families, else look at the module."""
        training = training or self.spec.training
        if training.adapter is not None and self.family not in FAMILIES:
            subject, inputs = subject_of(replace(self.spec, training=training))
            subject, _ = with_finetuning(subject, training)
            return dataless_table(subject, _random([(x.shape, x.vocabulary) for x in inputs], "fp32", TABLE_BATCH))
        if self._table is None:
            self._table = table_of(self.spec)
        return self._table

    def setup(self, options: Mapping[str, Any]) -> TrainingSetup:
        """Return the spec's own training with some options changed."""
        changes = {name: value for name, value in options.items() if value is not None}
        if changes.get("batch_size", self.spec.training.batch_size) != self.spec.training.batch_size:
            changes.setdefault("last_batch_size", None)  # the odd last batch belongs to the original batch size
        if "optimizer" in changes:
            changes["optimizer"] = parse_optimizer(changes["optimizer"])
        return replace(self.spec.training, **changes)

    def prepare(self, training: TrainingSetup) -> PreparedJob:
        """Build the subject anew, as a backend does."""
        subject, inputs = subject_of(replace(self.spec, training=training))
        form = training.checkpointing_form
        if form is not None and not (training.checkpointing is True and self.family in FAMILIES):
            enable_checkpointing(subject, form)  # the plan of a generated network has the default form
        use_loss_form(subject, training.loss_form)
        subject, facts = with_finetuning(subject, training)
        make = partial(_random, [(item.shape, item.vocabulary) for item in inputs], training.dtype)
        facts = (*facts, *optimizer_facts(training.optimizer))
        return PreparedJob(subject, make, training, factory_of(training.optimizer), facts=facts)


def _random(shapes: Sequence[tuple[tuple[int, ...], int | None]], dtype: str, size: int) -> tuple[Tensor, ...]:
    return random_inputs(shapes, size, dtype, "meta")


class ModuleJob(Job):
    """A module on the meta device with batches of any structure, and optionally its own step and optimizer."""

    runs_emulated = False
    """True if it trains on a virtual GPU without an attempt on meta tensors first."""
    steps = 5
    """Training steps on a virtual GPU."""
    nonzero_fraction = 1.0
    """The part of its places that a mask with unknown values selects there."""
    masks: frozenset[int] = frozenset()
    """Places of masks for padding in a batch, which select less than everything there."""

    def __init__(
        self,
        module: nn.Module,
        make: MakeBatch,
        step: TrainingStep | None = None,
        optimizer: OptimizerOf | None = None,
        family: str = "module",
        rebuild: Callable[[], nn.Module] | None = None,
    ) -> None:
        self.module = module.train()
        self.rebuild = rebuild
        self.runs_emulated = self.runs_emulated or rebuild is not None
        """Makes the module on the virtual GPU, for networks that choose their device themselves."""
        self.batch = Batches(make)
        self.step = step
        self.family = family
        self.optimizer = optimizer

    @cached_property
    def dtype(self) -> str:
        """The dtype of most parameters."""
        names = {dtype: name for name, dtype in DTYPES.items()}
        counts = Counter(names.get(item.dtype, "fp32") for item in self.module.parameters())
        return counts.most_common(1)[0][0] if counts else "fp32"

    def setup(self, options: Mapping[str, Any]) -> TrainingSetup:
        """Return a setup in the module's dtype and with its own optimizer, unless the options name others."""
        chosen = {name: value for name, value in options.items() if value is not None}
        trains = chosen.get("mode", "training") == "training"
        usual = OWN if self.optimizer else DEFAULT
        optimizer = parse_optimizer(chosen.get("optimizer") or (usual if trains else NO_OPTIMIZER))
        if optimizer == OWN and self.optimizer is None:
            raise UserError("expected a network with configure_optimizers, found none: name one with --optimizer")
        return TrainingSetup(**{"dtype": self.dtype, **chosen, "optimizer": optimizer})

    def table(self, training: TrainingSetup | None = None) -> LayerTable:
        """Run the module once and return its layers."""
        if training is None or training.adapter is None:
            return self._table_and_loss[0]
        module, _ = with_finetuning(copy_to_meta(self.module).to(DTYPES[training.dtype]), training)
        watched = BatchCall(module) if self.step is None else LossCall(module, self.step)
        table = dataless_table(watched, (self.batch(TABLE_BATCH, training.dtype),))
        return replace(table, layers=tuple(replace(item, name=own_name(item.name)) for item in table.layers))

    def details(self, training: TrainingSetup) -> LayerTable:
        """Run a copy once in single precision and return its layers with what they read and keep."""
        module, _ = with_finetuning(copy_to_meta(self.module).float(), replace(training, dtype="fp32"))
        watched = BatchCall(module) if self.step is None else LossCall(module, self.step)
        with Dataless():
            table = detailed_table(watched, (self.batch(TABLE_BATCH, "fp32"),), TABLE_BATCH)
        return replace(table, layers=tuple(replace(item, name=own_name(item.name)) for item in table.layers))

    @cached_property
    def _table_and_loss(self) -> tuple[LayerTable, str | None]:
        """The layers, and the name of the built-in loss that suits the output, if one does."""
        batch = self.batch(TABLE_BATCH, self.dtype)
        watched = BatchCall(self.module) if self.step is None else LossCall(self.module, self.step)
        outputs: list[Any] = []
        handle = watched.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
        try:
            with Dataless() as dataless:
                table = layer_table(watched, (batch,), TABLE_BATCH)
            self.places = dataless.places
        finally:
            handle.remove()
        layers = tuple(replace(item, name=own_name(item.name)) for item in table.layers)
        return replace(table, layers=layers), builtin_loss(outputs[-1], batch) if self.step is None else None

    def prepare(self, training: TrainingSetup) -> PreparedJob:
        """Copy the structure in the setup's dtype; use the built-in step where its loss suits the output."""
        if not any(item.requires_grad for item in self.module.parameters()):
            raise UserError("expected a network with trainable parameters, found none: unfreeze some")
        loss = self._table_and_loss[1]
        module, facts = self.copy_for(training)
        for size in training.batch_sizes:  # drawn before the trace starts: drawing is not part of the job
            self.batch(size, training.dtype)
        whole = partial(self._whole_batch, training.dtype)
        trainers = module if self.step is trainer_step else None
        make = self._own_optimizer(module) if training.optimizer == OWN else factory_of(training.optimizer, trainers)
        stated = self.batch.notes(training.batch_size), (*facts, *optimizer_facts(training.optimizer))
        if loss is None:
            return PreparedJob(LossCall(module, self.step), whole, replace(training, loss="own"), make, *stated)
        arguments = partial(self._arguments, training.dtype)
        return PreparedJob(module, arguments, replace(training, loss=loss), make, *stated)

    def copy_for(self, training: TrainingSetup) -> tuple[nn.Module, tuple[str, ...]]:
        """Return a copy on meta with the dtype, checkpointing, loss and adapter of a setup, and facts about it."""
        module = copy_to_meta(self.module)
        if training.dtype != self.dtype:
            module = module.to(DTYPES[training.dtype])
        if training.checkpointing_form is not None:
            enable_checkpointing(module, training.checkpointing_form)
        use_loss_form(module, training.loss_form)
        return with_finetuning(module, training)

    def _arguments(self, dtype: str, size: int) -> tuple[Any, ...]:
        return _as_arguments(self.batch(size, dtype))

    def _whole_batch(self, dtype: str, size: int) -> tuple[Any]:
        return (self.batch(size, dtype),)

    def _own_optimizer(self, module: nn.Module) -> MakeOptimizer:
        configure = self.optimizer
        if configure is None:
            raise RuntimeError("the module has no optimizer of its own")
        return lambda _: configure(module)


def _as_arguments(batch: Any) -> tuple[Any, ...]:
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)


class Dataless(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs networks on meta like the virtual GPU, without a trace; `places` are the lines where it must guess."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: dict[str, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = SHAPES.get(func)
        out = rule(*args, **(kwargs or {})) if rule is not None else NotImplemented
        if out is not NotImplemented:
            return out
        assumptions: set[str] = set()
        out = without_data(func, args, kwargs or {}, assumptions)
        for phrase in assumptions - self.places.keys():  # the first line is enough to find the others
            if place := place_now():
                self.places[phrase] = place
        return out


def own_name(name: str) -> str:
    """Return a layer's name in the user's network, without the wrappers of `steps` and of peft."""
    while name.startswith("subject."):
        name = name.removeprefix("subject.")
    name = name.removeprefix("base_model.model.")
    return "" if name in ("subject", "base_model", "base_model.model") else name


def dataless_table(module: nn.Module, inputs: tuple[Any, ...]) -> LayerTable:
    """Run a module once on the meta device and return its layers."""
    with Dataless():
        return layer_table(module, inputs, TABLE_BATCH)


def detailed_table_of(spec: Spec) -> LayerTable:
    """Return the layers of any spec's network with all fields, in single precision, with its adapter if it has one."""
    training = replace(spec.training, dtype="fp32", checkpointing=False)
    subject, inputs = subject_of(replace(spec, training=training))
    subject, _ = with_finetuning(subject, training)
    return detailed_table(subject, _random([(x.shape, x.vocabulary) for x in inputs], "fp32", TABLE_BATCH))


def table_of(spec: Spec) -> LayerTable:
    """Return the layers of a spec's network: from the filter for generated families, else from the module."""
    if spec.family in FAMILIES:
        verdict = check(spec)
        if isinstance(verdict, Rejected):
            raise UserError(f"expected a network that can be trained, found that {verdict.reason}: change it")
        return verdict
    return _external_table(spec.family, canonical_json(dict(spec.network)))


@lru_cache(maxsize=2000)
def _external_table(family: str, network: str) -> LayerTable:
    """Cache the table of a library's network, which does not depend on its training."""
    module, inputs = build_external(family, json.loads(network))
    shapes = [(item.shape, item.vocabulary) for item in inputs]
    with Dataless():
        return layer_table(module, random_inputs(shapes, TABLE_BATCH, "fp32", "meta"))
