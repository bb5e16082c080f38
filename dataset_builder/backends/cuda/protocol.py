"""The messages of a measurement, which the reader checks."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from vramcast.jobs.spec import Spec
from vramcast.virtual_gpu.measurement import Status

CONTEXT, RESULT = "context", "result"
GO = {"do": "go"}
"""The child waits for this request after creating its context, whose memory the parent reads meanwhile."""
PEAKS = ("requested_bytes", "allocated_bytes", "reserved_bytes")

_OUT_OF_MEMORY = (
    "out of memory",  # torch's allocator, and the driver: cudaErrorMemoryAllocation
    "STATUS_ALLOC_FAILED",  # cuBLAS and cuDNN
)


def is_out_of_memory(text: str) -> bool:
    """Return True if an error says that the GPU is full; on the host torch says 'can't allocate memory'."""
    return any(words in text for words in _OUT_OF_MEMORY)


@dataclass(frozen=True, kw_only=True)
class MeasureRequest:
    """The run that a child is asked for."""

    spec: Spec
    epochs: int
    cap_bytes: int | None = None
    """Limit of what the allocator reserves; None for no limit."""

    def to_json(self) -> dict[str, Any]:
        """Return a mapping that `from_json` reads."""
        return {"spec": self.spec.to_json(), "epochs": self.epochs, "cap_bytes": self.cap_bytes}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read a request written by `to_json`."""
        return cls(spec=Spec.from_json(values["spec"]), epochs=values["epochs"], cap_bytes=values["cap_bytes"])


@dataclass(frozen=True, kw_only=True)
class ChildResult:
    """The outcome of a run as the child reports it."""

    status: Status
    requested_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    retries: int = 0
    """Number of times that the allocator emptied its cache because the GPU was full."""
    evidence: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return an event that `from_json` reads."""
        return {"event": RESULT, **asdict(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read a result; raise ValueError if the values are not one."""
        arguments = {name: value for name, value in values.items() if name != "event"}
        for name in (*PEAKS, "retries"):
            if arguments.get(name) is not None and type(arguments[name]) is not int:
                raise ValueError(f"{name} is {arguments[name]!r}")
        if not isinstance(arguments.get("versions", {}), dict):
            raise ValueError("versions is not a mapping")  # noqa: TRY004 - one error type for all bad results
        try:
            return cls(**{**arguments, "status": Status(arguments["status"])})
        except (KeyError, TypeError) as error:
            raise ValueError(str(error)) from error
