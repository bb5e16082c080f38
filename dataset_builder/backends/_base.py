"""The contract of measuring backends."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

from vramcast.jobs.spec import LayerTable, Spec
from vramcast.virtual_gpu.measurement import Measurement


@dataclass(frozen=True)
class BackendResult:
    """The measurement of one spec, and what a backend learns about its origin while it measures."""

    measurement: Measurement
    device: str | None = None
    """The GPU's name, where the backend finds it only while it measures; and its UUID and software."""
    gpu_uuid: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    table: LayerTable | None = None
    """The layers of the network, where they were requested."""
    needs: Mapping[str, Measurement] = field(default_factory=dict)
    """What the spec needs on other devices, or on this one if it does not fit: see `Row.needs`."""
    siblings: "tuple[tuple[Spec, BackendResult], ...]" = ()
    """Results of the same network with other batch sizes, which the backend got on the way."""


class Backend(ABC):
    """Measures one spec at a time. Instances are pickled to worker processes, so they hold plain settings only.

    Running out of GPU memory is a status of the measurement, never an exception.
    """

    name: ClassVar[str]
    origin: ClassVar[str]
    """'static', 'simulated' or 'measured': the kind of figure in the rows."""
    device: str | None = None
    longest_seconds: float | None = None
    """The backend's own time limit for a spec, if it has one; an executor's limit must be longer."""

    @abstractmethod
    def measure(self, spec: Spec) -> BackendResult:
        """Measure a spec that the filter accepted."""

    def lanes(self) -> Sequence[Self] | None:
        """Return this backend once for each device that it can use at the same time; None if it needs none."""
        return None
