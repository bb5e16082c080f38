"""A row (a spec, its static estimate, its measurement and their origin), and a rejected spec.

They are plain dataclasses, so reading a row needs neither torch nor pandas.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    needs: Mapping[str, Measurement] = field(default_factory=dict)
    """By device profile: what replays of the same trace without a memory limit took, with the status of one within the
    limit. A device is left out if its figures are those of `measurement`."""

    def to_json(self) -> dict[str, Any]:
        """Return a mapping that `from_json` reads."""
        return {
            "id": self.spec.id,
            "spec": self.spec.to_json(),
            # not asdict(), whose deep copies take a tenth of the time of a build
            "static": dict(vars(self.static)) if self.static else None,
            "measurement": dict(vars(self.measurement)),
            "provenance": dict(vars(self.provenance)),
            **({"needs": {device: _set_fields(item) for device, item in self.needs.items()}} if self.needs else {}),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read a mapping that `to_json` wrote."""
        static = values["static"]
        return cls(
            Spec.from_json(values["spec"]),
            StaticEstimate(**static) if static else None,
            _measurement(values["measurement"]),
            Provenance(**values["provenance"]),
            {device: _measurement(item) for device, item in values.get("needs", {}).items()},
        )


def _set_fields(measurement: Measurement) -> dict[str, Any]:
    """Return the fields of a measurement that say something."""
    return {name: value for name, value in vars(measurement).items() if value is not None and value != ()}


def _measurement(values: Mapping[str, Any]) -> Measurement:
    notes = tuple(values.get("notes", ()))
    return Measurement(**{**values, "status": Status(values["status"]), "notes": notes})


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
