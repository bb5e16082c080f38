"""The settings of a service. The defaults suit one process on loopback."""

from dataclasses import dataclass, field
from pathlib import Path

from vramcast.collocation.adapters.claims import GPU_CLASS
from vramcast.defaults import CHECKPOINT, RISK
from vramcast.device.profiles import DEFAULT_DEVICE


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on what clients can make the service do and keep. Beyond them it answers 408, 413, 422, 503 or 507."""

    body_bytes: int = 1 << 20
    """Checked before a body is parsed. 1 MiB is also the limit of HAMi's extender (pkg/scheduler/routes/route.go)."""
    body_seconds: float = 10.0
    """Time for a client to send a body."""
    header_seconds: float = 10.0
    """Time for a client to send the headers."""
    reading_bodies: int = 1024
    """Bodies that are being received."""
    reading_bytes: int = 64 << 20
    """Their size so far."""
    in_flight: int = 512
    """Requests that are being answered."""
    in_flight_bytes: int = 64 << 20
    """The size of their bodies."""
    inline_body_bytes: int = 8 << 10
    """Larger bodies are parsed in a worker process, because parsing blocks the event loop."""
    large_requests: int = 4
    """Requests with such bodies that are answered at a time: parsed, a body takes many times its size."""
    waiting_bodies: int = 256
    """Bodies that wait for that."""
    parse_seconds: float = 5.0
    parser_bytes: int = 1 << 30
    """Memory of the process that parses bodies."""
    waiting_traces: int = 64
    trace_seconds: float = 30.0
    """Time for the simulation of one network, in a worker process that may have to import its library."""
    abandoned_seconds: float = 2.0
    """The same, once nobody waits for it. Slurm's plugin does not wait, and comes back for the result."""
    worker_bytes: int = 4 << 30
    """Memory of a process that simulates networks."""
    layers: int = 3000
    """Layers of a network or a table: attention over layers and the time of a simulation grow with them."""
    layer_passes: int = 16_000
    """Layers times accumulated passes: each takes about 0.7 ms of simulation."""
    largest_batch: int = 64
    """Jobs in one forward pass."""
    batch_layers: int = 6_000
    """Their layers, so that a forward pass does not take seconds; a single job may have more."""
    response_cache_bytes: int = 32 << 20
    trace_cache_bytes: int = 128 << 20
    node_registry_bytes: int = 32 << 20
    history_jobs: int = 2_000_000
    """Jobs with observations in the database; those that were observed longest ago are dropped first."""
    cached_history_jobs: int = 100_000
    """Jobs whose history is in memory, of a few hundred bytes each."""
    look_up_seconds: float = 0.5
    """Time for the database to find a job."""
    waiting_observations: int = 10_000
    """Observations in the file of those that wait for a database."""
    store_seconds: float = 4.0
    """Time for the disk to store an observation: less than `Client` waits, so that a client learns of a failure."""
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
    """Processes that simulate networks."""
    token: str | None = field(default=None, repr=False)
    named_specs: Path | None = None
    """JSON lines of specs with names; they are simulated before the service is ready."""
    prices: Path | None = None
    """YAML: the price of an hour of each device, for /v1/solve."""
    history: str | Path | None = None
    """The database of observations: a file, or the URL of PostgreSQL; without it they are lost with the service."""
    history_queue: Path | None = None
    """The file of observations that wait for a database that is down."""
    import_history: Path | None = None
    """A history of an earlier version, which is added once."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    kubernetes: bool = True
    """Serve the paths below /k8s and /volcano. They need no token, because kube-scheduler cannot send one."""
    resource: str = "hami"
    """The resource that the admission webhook writes: see collocation.adapters.pod_resources.RESOURCES."""
    device_class: str = GPU_CLASS
    """The DeviceClass whose claims get an amount, with the resource `dra`."""
    log_requests: bool = True
    limits: Limits = field(default_factory=Limits)
