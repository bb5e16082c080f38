"""What every measuring backend owes the pipeline."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

from vramcast.dataset_builder.schema import Spec, StaticEstimate
from vramcast.virtual_gpu.measurement import Measurement


@dataclass(frozen=True)
class Outcome:
    """What a backend says of one spec."""

    static: StaticEstimate | None
    measurement: Measurement
    device: str | None = None
    """The card that it was measured on, where a backend finds it only then; and its UUID and software."""
    gpu_uuid: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


class Backend(ABC):
    """Measures one spec at a time. Instances are pickled to worker processes, so they hold plain settings only.

    Running out of GPU memory is an outcome with that status, never an exception.
    """

    name: ClassVar[str]
    origin: ClassVar[str]
    """'static', 'simulated' or 'measured': what kind of figure the rows carry."""
    device: str | None = None
    longest_seconds: float | None = None
    """After which a backend with a time limit of its own gives a spec up; an executor's limit must be longer."""

    @abstractmethod
    def measure(self, spec: Spec) -> Outcome:
        """Measure a spec that the filter accepted."""

    def lanes(self) -> Sequence[Self] | None:
        """This backend once for each device that it can use at the same time; None if it needs none."""
        return None
