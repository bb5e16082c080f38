"""What can be inspected: a network with its inputs, its loss and its optimizer, under any training setup."""

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dataset_builder.analysis.layers import layer_table
from dataset_builder.errors import UserError
from dataset_builder.families import FAMILIES
from dataset_builder.families.external import build_external
from dataset_builder.filters import Rejected, check
from dataset_builder.inspection.batches import MakeBatch, batches
from dataset_builder.inspection.checkpointing import enable_checkpointing
from dataset_builder.inspection.copies import structure_of
from dataset_builder.inspection.steps import Called, Step, Stepped, default_step, plain_loss
from dataset_builder.measure.virtual.session import MakeInputs, MakeOptimizer
from dataset_builder.measure.virtual.trace import without_data
from dataset_builder.schema import LayerTable, Spec, TrainingSetup, canonical_json
from dataset_builder.subject import subject_of
from dataset_builder.training import DTYPES, random_inputs

TABLE_BATCH = 2
"""Any batch shows a module's layers; a norm in training mode wants more than one sample."""
OptimizerOf = Callable[[nn.Module], torch.optim.Optimizer]
"""The optimizer that a module brings along."""


class Job(ABC):
    """A network that can be trained in several ways."""

    family: str | None = None
    make_optimizer: MakeOptimizer | None = None
    """The optimizer that takes the place of the one that a setup names."""

    @abstractmethod
    def table(self) -> LayerTable:
        """The layers of the network."""

    @abstractmethod
    def prepared(self, training: TrainingSetup) -> tuple[nn.Module, MakeInputs, TrainingSetup]:
        """The network on meta in training mode, its inputs, and the setup with what the network decides of it."""


class SpecJob(Job):
    """The network of a spec, whatever its training says."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.family = spec.family

    def table(self) -> LayerTable:
        """By the filter where there is a plan."""
        return table_of(self.spec)

    def prepared(self, training: TrainingSetup) -> tuple[nn.Module, MakeInputs, TrainingSetup]:
        """Built anew for each setup, as a backend does."""
        subject, inputs = subject_of(replace(self.spec, training=training))
        if training.checkpointing and self.family not in FAMILIES:
            enable_checkpointing(subject)
        shapes = [(item.shape, item.vocabulary) for item in inputs]
        return subject, lambda size: random_inputs(shapes, size, training.dtype, "meta"), training


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
            with Dataless():  # type: ignore[no-untyped-call]
                table = layer_table(watched, (batch,))
        finally:
            handle.remove()
        layers = tuple(replace(item, name=own_name(item.name)) for item in table.layers)
        return replace(table, layers=layers), plain_loss(outputs[-1], batch) if self.step is None else None

    def prepared(self, training: TrainingSetup) -> tuple[nn.Module, MakeInputs, TrainingSetup]:
        """A copy of the structure in the setup's dtype; in the builder's own step where that will do."""
        module, loss = structure_of(self.module).to(DTYPES[training.dtype]), self._looked_at[1]
        if training.checkpointing:
            enable_checkpointing(module)
        for size in training.batch_sizes:  # drawn here, lest the tracer take what is drawn for a part of the job
            self.batch(size, training.dtype)
        self.make_optimizer = (lambda _: self.optimizer(module)) if self.optimizer else None  # type: ignore[misc]
        if loss is None:
            stepped = Stepped(module, self.step or default_step)
            return stepped, lambda size: (self.batch(size, training.dtype),), replace(training, loss="own")

        def inputs(size: int) -> tuple[Any, ...]:
            batch = self.batch(size, training.dtype)
            return tuple(batch) if isinstance(batch, tuple | list) else (batch,)

        return module, inputs, replace(training, loss=loss)


class Dataless(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs networks on meta as the virtual GPU does, without a trace."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return without_data(func, args, kwargs or {}, set())


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
    return layer_table(module, random_inputs(shapes, TABLE_BATCH, "fp32", "meta"))
