"""What can be inspected: a network with its inputs, its loss and its optimizer, under any training setup."""

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from vramcast.dataset_builder.analysis.layers import layer_table
from vramcast.dataset_builder.families import FAMILIES
from vramcast.dataset_builder.families.external import build_external
from vramcast.dataset_builder.families.meta_device import copy_to_meta
from vramcast.dataset_builder.filters import Rejected, check
from vramcast.dataset_builder.jobs.batches import MakeBatch, batches
from vramcast.dataset_builder.jobs.checkpointing import enable_checkpointing
from vramcast.dataset_builder.jobs.optimizers import DEFAULT, OWN, made_by, optimizer_named
from vramcast.dataset_builder.jobs.steps import Called, Step, Stepped, plain_loss
from vramcast.dataset_builder.schema import LayerTable, Spec
from vramcast.dataset_builder.subject import subject_of
from vramcast.errors import UserError
from vramcast.virtual_gpu.records import canonical_json
from vramcast.virtual_gpu.session import MakeInputs, MakeOptimizer
from vramcast.virtual_gpu.shapes import SHAPES
from vramcast.virtual_gpu.source_lines import place_now
from vramcast.virtual_gpu.trace import without_data
from vramcast.virtual_gpu.training_setup import TrainingSetup
from vramcast.virtual_gpu.training_step import DTYPES, random_inputs

TABLE_BATCH = 2
"""Any batch shows a module's layers; a norm in training mode wants more than one sample."""
OptimizerOf = Callable[[nn.Module], torch.optim.Optimizer]
"""The optimizer that a module brings along."""


@dataclass(frozen=True)
class Prepared:
    """A job under one training setup, ready to be traced."""

    subject: nn.Module
    """On meta and in training mode."""
    make_inputs: MakeInputs
    training: TrainingSetup
    """With what the network decides of it."""
    make_optimizer: MakeOptimizer | None = None
    """The optimizer that takes the place of the one that the setup names."""


class Job(ABC):
    """A network that can be trained in several ways."""

    family: str | None = None
    places: Mapping[str, str] = MappingProxyType({})
    """Lines of the network's own code at which something was assumed, by what was."""

    @abstractmethod
    def table(self) -> LayerTable:
        """The layers of the network."""

    @abstractmethod
    def setup(self, wishes: Mapping[str, Any]) -> TrainingSetup:
        """The training that somebody wishes for, with what he leaves to the network."""

    @abstractmethod
    def prepared(self, training: TrainingSetup) -> Prepared:
        """The job under a setup."""


class SpecJob(Job):
    """The network of a spec, whatever its training says."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.family = spec.family

    def table(self) -> LayerTable:
        """By the filter where there is a plan."""
        return table_of(self.spec)

    def setup(self, wishes: Mapping[str, Any]) -> TrainingSetup:
        """The spec's own, changed."""
        changes = {name: value for name, value in wishes.items() if value is not None}
        if changes.get("batch_size", self.spec.training.batch_size) != self.spec.training.batch_size:
            changes.setdefault("last_batch_size", None)  # the odd last batch belongs to the batches before it
        if "optimizer" in changes:
            changes["optimizer"] = optimizer_named(changes["optimizer"])
        return replace(self.spec.training, **changes)

    def prepared(self, training: TrainingSetup) -> Prepared:
        """Built anew for each setup, as a backend does."""
        subject, inputs = subject_of(replace(self.spec, training=training))
        if training.checkpointing and self.family not in FAMILIES:
            enable_checkpointing(subject)
        shapes = [(item.shape, item.vocabulary) for item in inputs]
        make = partial(_random, shapes, training.dtype)
        return Prepared(subject, make, training, made_by(training.optimizer))


def _random(shapes: Sequence[tuple[tuple[int, ...], int | None]], dtype: str, size: int) -> tuple[Tensor, ...]:
    return random_inputs(shapes, size, dtype, "meta")


class ModuleJob(Job):
    """A module on the meta device, with batches of any structure, and perhaps a step and an optimizer of its own."""

    def __init__(
        self,
        module: nn.Module,
        make: MakeBatch,
        step: Step | None = None,
        optimizer: OptimizerOf | None = None,
        family: str = "module",
    ) -> None:
        self.module = module.train()
        self.batch = batches(make)
        self.step = step
        self.family = family
        self.optimizer = optimizer

    @cached_property
    def dtype(self) -> str:
        """What most of the parameters are in."""
        names = {dtype: name for name, dtype in DTYPES.items()}
        counts = Counter(names.get(item.dtype, "fp32") for item in self.module.parameters())
        return counts.most_common(1)[0][0] if counts else "fp32"

    def setup(self, wishes: Mapping[str, Any]) -> TrainingSetup:
        """In the module's dtype and with its own optimizer, unless others are wished for."""
        given = {name: value for name, value in wishes.items() if value is not None}
        optimizer = optimizer_named(given.get("optimizer") or (OWN if self.optimizer else DEFAULT))
        if optimizer == OWN and self.optimizer is None:
            raise UserError("expected a network with configure_optimizers, found none: name one by --optimizer")
        return TrainingSetup(**{"dtype": self.dtype, **given, "optimizer": optimizer})

    def table(self) -> LayerTable:
        """By running it once."""
        return self._looked_at[0]

    @cached_property
    def _looked_at(self) -> tuple[LayerTable, str | None]:
        """The layers, and the loss of the builder's own step where that will do for the output."""
        batch = self.batch(TABLE_BATCH, self.dtype)
        watched = Called(self.module) if self.step is None else Stepped(self.module, self.step)
        outputs: list[Any] = []
        handle = watched.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
        try:
            with Dataless() as dataless:
                table = layer_table(watched, (batch,), TABLE_BATCH)
            self.places = dataless.places
        finally:
            handle.remove()
        layers = tuple(replace(item, name=own_name(item.name)) for item in table.layers)
        return replace(table, layers=layers), plain_loss(outputs[-1], batch) if self.step is None else None

    def prepared(self, training: TrainingSetup) -> Prepared:
        """A copy of the structure in the setup's dtype; in the builder's own step where that will do."""
        module, loss = copy_to_meta(self.module), self._looked_at[1]
        if training.dtype != self.dtype:
            module = module.to(DTYPES[training.dtype])
        if training.checkpointing:
            enable_checkpointing(module)
        for size in training.batch_sizes:  # drawn here, lest the tracer take what is drawn for a part of the job
            self.batch(size, training.dtype)
        whole = partial(self._whole, training.dtype)
        make = self._own_optimizer(module) if training.optimizer == OWN else made_by(training.optimizer)
        if loss is None:
            return Prepared(Stepped(module, self.step), whole, replace(training, loss="own"), make)
        return Prepared(module, lambda size: _listed(whole(size)[0]), replace(training, loss=loss), make)

    def _whole(self, dtype: str, size: int) -> tuple[Any]:
        return (self.batch(size, dtype),)

    def _own_optimizer(self, module: nn.Module) -> MakeOptimizer:
        configure = self.optimizer
        if configure is None:
            raise RuntimeError("the module brings no optimizer along")
        return lambda _: configure(module)


def _listed(batch: Any) -> tuple[Any, ...]:
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)


class Dataless(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs networks on meta as the virtual GPU does, without a trace; `places` are the lines where it must guess."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: dict[str, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = SHAPES.get(func)
        out = rule(*args, **(kwargs or {})) if rule is not None else NotImplemented
        if out is not NotImplemented:
            return out
        assumed: set[str] = set()
        out = without_data(func, args, kwargs or {}, assumed)
        for phrase in assumed - self.places.keys():  # the first line is enough to find the others
            if place := place_now():
                self.places[phrase] = place
        return out


def own_name(name: str) -> str:
    """A layer's name in its own network, without the wrappers of this package."""
    while name.startswith("subject."):
        name = name.removeprefix("subject.")
    return "" if name == "subject" else name


def table_of(spec: Spec) -> LayerTable:
    """The layers of a spec's network: by the filter where there is a plan, else by looking at the module."""
    if spec.family in FAMILIES:
        found = check(spec)
        if isinstance(found, Rejected):
            raise UserError(f"expected a network that can be trained, found that {found.reason}: change it")
        return found
    return _external_table(spec.family, canonical_json(dict(spec.network)))


@lru_cache(maxsize=2000)
def _external_table(family: str, network: str) -> LayerTable:
    """A network of a library is looked at once, whatever it is trained with."""
    module, inputs = build_external(family, json.loads(network))
    shapes = [(item.shape, item.vocabulary) for item in inputs]
    with Dataless():
        return layer_table(module, random_inputs(shapes, TABLE_BATCH, "fp32", "meta"))
