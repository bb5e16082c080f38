"""What an operator decides. Defaults are for one process on loopback."""

from dataclasses import dataclass, field
from pathlib import Path

from vramcast.dataset_builder.defaults import CHECKPOINT, RISK
from vramcast.dataset_builder.devices import DEFAULT_DEVICE


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds, each of which ends in an answer (408, 413, 422, 503 or 507) or in something forgotten."""

    body_bytes: int = 1 << 20
    """Looked at before anything is parsed. 1 MB is also what HAMi's extender takes (pkg/scheduler/routes/route.go)."""
    body_seconds: float = 10.0
    """A client may take so long to send a body, and below its headers."""
    header_seconds: float = 10.0
    in_flight: int = 512
    """Requests at once; more are told to come back."""
    waiting_traces: int = 64
    trace_seconds: float = 20.0
    """Of one network, in a worker process, which is ended after that."""
    worker_bytes: int = 4 << 30
    """Of memory that a worker process may take."""
    layers: int = 3000
    """Of a network or a table: attention over layers and the work of a trace grow with them."""
    largest_batch: int = 64
    """Jobs in one forward pass."""
    response_cache_bytes: int = 32 << 20
    trace_cache_bytes: int = 128 << 20
    history_jobs: int = 100_000
    """Jobs of which is remembered what they took, a few hundred bytes each."""
    store_seconds: float = 4.0
    """Of the disk, with an observation: less than `Client` waits, so that it is told."""
    shutdown_seconds: float = 30.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One running service."""

    checkpoint: str = CHECKPOINT
    """A released name, or a directory."""
    device: str = DEFAULT_DEVICE
    """For jobs that name none."""
    risk: float = RISK
    host: str = "127.0.0.1"
    port: int = 8080
    workers: int = 1
    """Processes that trace networks."""
    token: str | None = field(default=None, repr=False)
    known: Path | None = None
    """JSON lines of specs that go by a name; traced before the service is ready."""
    history: Path | None = None
    """Where to keep what jobs were seen to take; without it that is forgotten when the service ends."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    kubernetes: bool = True
    """Whether the paths below /k8s are there. kube-scheduler can send no token, so none is asked for on them."""
    resource: str = "hami"
    """What the admission webhook writes: see collocation.adapters.admission.RESOURCES."""
    log_requests: bool = True
    limits: Limits = field(default_factory=Limits)
