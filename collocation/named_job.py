"""A job on a network that a library builds from its name: no file of a client is read, and none of its code runs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from vramcast.jobs.job_request import JobRequest
from vramcast.jobs.optimizers import DEFAULT, parse_optimizer
from vramcast.jobs.targets import BuildRequest
from vramcast.virtual_gpu.canonical import canonical_json, content_hash, without_defaults
from vramcast.virtual_gpu.training.setup import NO_OPTIMIZER, TrainingSetup


@dataclass(frozen=True)
class NamedJob:
    """How a network is built by its name, and the options of its training."""

    build: BuildRequest
    options: Mapping[str, Any]
    """Training options; None leaves an option to the network."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Check the values of a request, which have the names of a line of `vramcast classify --jobs`."""
        return cls.of_request(JobRequest.of_known(values))

    @classmethod
    def of_request(cls, request: JobRequest) -> Self:
        """Return the job of a checked request."""
        build = replace(request.build_request(), directory=".")
        job = cls(build, request.options)
        _ = job.training  # options that contradict each other are refused before a worker builds the network
        return job

    @property
    def target(self) -> str:
        """The name, with its library."""
        return self.build.target.text

    @cached_property
    def training(self) -> TrainingSetup:
        """The setup in which the libraries' networks, which are built in fp32, are trained."""
        chosen = {name: value for name, value in self.options.items() if value is not None}
        trains = chosen.get("mode", "training") == "training"
        optimizer = parse_optimizer(chosen.get("optimizer") or (DEFAULT if trains else NO_OPTIMIZER))
        return TrainingSetup(**{**chosen, "optimizer": optimizer})

    @cached_property
    def network(self) -> str:
        """A text that is equal for equal networks."""
        return canonical_json(self.build.to_json())

    @cached_property
    def id(self) -> str:
        """A hash over the network and its training, like that of a spec."""
        return content_hash({"network": self.network, "training": without_defaults(self.training)})

    def with_options(self, **changes: Any) -> Self:
        """Return the job with some training options changed."""
        if changes.get("batch_size", self.options["batch_size"]) != self.options["batch_size"]:
            changes.setdefault("last_batch_size", None)  # the odd last batch belongs to the original batch size
        return replace(self, options={**self.options, **changes})

    def with_length(self, length: int) -> Self:
        """Return the job with another length of its sequences."""
        return replace(self, build=replace(self.build, inputs=(str(length),)))

    @property
    def without_rate(self) -> Self:
        """The same without the learning rate, which decides no memory."""
        return self.with_options(optimizer=self.training.without_rate.optimizer) if self.training.is_training else self
