"""The job of a spec that trains on a virtual GPU, with another batch in each step."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from vramcast.errors import UserError
from vramcast.jobs.batches import Batches
from vramcast.jobs.families.meta_device import build_on_meta
from vramcast.jobs.families.script_jobs import ScriptSubject
from vramcast.jobs.job import ModuleJob
from vramcast.jobs.spec import Spec
from vramcast.virtual_gpu.training.setup import TrainingSetup


class BatchSequence(Batches):
    """The batches of a script in their order, each drawn once."""

    def __init__(self, script: ScriptSubject) -> None:
        self._script = script
        self._batches: Iterator[Any] = iter(())

    def notes(self, size: int) -> tuple[str, ...]:
        """Start anew, and return what was assumed about the batches."""
        self._batches = self._script.batches(size)
        return self._script.notes

    def with_values(self, size: int) -> Any:
        """Return the next batch, on the meta device."""
        return next(self._batches)


class ScriptSpecJob(ModuleJob):
    """The network and the batches of a script."""

    runs_emulated = True

    def __init__(self, spec: Spec, script: ScriptSubject) -> None:
        super().__init__(build_on_meta(script.make), lambda size: None, family=spec.family)
        self.spec = spec
        self.batch = BatchSequence(script)
        self.steps = script.steps
        self.nonzero_fraction = script.nonzero_fraction

    def setup(self, options: Mapping[str, Any]) -> TrainingSetup:
        """Return the spec's own training with some options changed."""
        training = replace(self.spec.training, **{name: value for name, value in options.items() if value is not None})
        if training.needs_trace:
            raise UserError(
                f"expected one GPU and the usual step of the whole network for {self.spec.network['name']}, found "
                f"{', '.join(training.traced_options)}: leave it out"
            )
        return training
