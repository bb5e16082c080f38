"""What every measuring backend owes the pipeline."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from dataset_builder.schema import Measurement, Spec, StaticEstimate


@dataclass(frozen=True)
class Outcome:
    """What a backend says of one spec."""

    static: StaticEstimate | None
    measurement: Measurement


class Backend(ABC):
    """Measures one spec at a time. Instances are pickled to worker processes, so they hold plain settings only.

    Running out of GPU memory is an outcome with that status, never an exception.
    """

    name: ClassVar[str]
    origin: ClassVar[str]
    """'static', 'simulated' or 'measured': what kind of figure the rows carry."""
    device: str | None = None

    @abstractmethod
    def measure(self, spec: Spec) -> Outcome:
        """Measure a spec that the filter accepted."""
