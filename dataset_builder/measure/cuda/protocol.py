"""What the two sides of a measurement say to each other: lines of JSON, checked by whoever reads them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from vramcast.dataset_builder.schema import Spec
from vramcast.virtual_gpu.measurement import Status

CONTEXT, RESULT, REFUSED = "context", "result", "refused"
GO = b"go\n"
"""What the child waits for once its context exists: the parent has looked at it by then."""
PEAKS = ("requested_bytes", "allocated_bytes", "reserved_bytes")

_OUT_OF_MEMORY = (
    "out of memory",  # torch's allocator, and the driver: cudaErrorMemoryAllocation
    "STATUS_ALLOC_FAILED",  # cuBLAS and cuDNN
)


def is_out_of_memory(text: str) -> bool:
    """Whether an error's text tells of a full GPU; on the host torch says 'can't allocate memory'."""
    return any(words in text for words in _OUT_OF_MEMORY)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a child is to run."""

    spec: Spec
    epochs: int
    cap_bytes: int | None = None
    """What the allocator may reserve at most, None for all that there is."""

    def to_json(self) -> dict[str, Any]:
        """A mapping that `from_json` reads back."""
        return {"spec": self.spec.to_json(), "epochs": self.epochs, "cap_bytes": self.cap_bytes}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read a request as `to_json` wrote it."""
        return cls(spec=Spec.from_json(values["spec"]), epochs=values["epochs"], cap_bytes=values["cap_bytes"])


@dataclass(frozen=True, kw_only=True)
class Result:
    """How the run went, as the child sees it."""

    status: Status
    requested_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    retries: int = 0
    """How often the allocator emptied its cache because the card had no more."""
    evidence: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """An event that `from_json` reads back."""
        return {"event": RESULT, **asdict(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read a result, with a ValueError for what is none."""
        known = {name: value for name, value in values.items() if name != "event"}
        for name in (*PEAKS, "retries"):
            if known.get(name) is not None and type(known[name]) is not int:
                raise ValueError(f"{name} is {known[name]!r}")
        if not isinstance(known.get("versions", {}), dict):
            raise ValueError("versions are no mapping")  # noqa: TRY004 - one kind of error for what is no result
        try:
            return cls(**{**known, "status": Status(known["status"])})
        except (KeyError, TypeError) as error:
            raise ValueError(str(error)) from error
