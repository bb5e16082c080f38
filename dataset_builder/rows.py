"""A row (a spec, its static estimate, its measurement and their origin), and a rejected spec.

They are plain dataclasses, so reading a row needs neither torch nor pandas.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from vramcast.jobs.spec import Spec, StaticEstimate
from vramcast.virtual_gpu.measurement import Measurement, Status

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """The origin of a row."""

    origin: str
    """'static' (shapes alone), 'simulated' (virtual GPU) or 'measured' (on a GPU)."""
    backend: str
    device: str | None
    """The GPU, or the device profile that it was simulated on."""
    versions: Mapping[str, str]
    seed: int | None
    time: str
    """UTC, ISO 8601."""
    source: str | None = None
    """File and citation of published rows."""
    gpu_uuid: str | None = None
    """UUID of the GPU, if there was one."""


@dataclass(frozen=True)
class Row:
    """A spec with its static estimate and its measurement."""

    spec: Spec
    static: StaticEstimate | None
    measurement: Measurement
    provenance: Provenance

    def to_json(self) -> dict[str, Any]:
        """Return a mapping that `from_json` reads."""
        return {
            "id": self.spec.id,
            "spec": self.spec.to_json(),
            # not asdict(), whose deep copies take a tenth of the time of a build
            "static": dict(vars(self.static)) if self.static else None,
            "measurement": dict(vars(self.measurement)),
            "provenance": dict(vars(self.provenance)),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read a mapping that `to_json` wrote."""
        measurement = {**values["measurement"], "status": Status(values["measurement"]["status"])}
        measurement["notes"] = tuple(measurement.get("notes", ()))
        static = values["static"]
        return cls(
            Spec.from_json(values["spec"]),
            StaticEstimate(**static) if static else None,
            Measurement(**measurement),
            Provenance(**values["provenance"]),
        )


@dataclass(frozen=True)
class Rejection:
    """A sampled configuration that cannot be trained, with the reason."""

    spec: Spec
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Return a mapping that `from_json` reads."""
        return {"id": self.spec.id, "spec": self.spec.to_json(), "reason": self.reason}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read a mapping that `to_json` wrote."""
        return cls(Spec.from_json(values["spec"]), values["reason"])
