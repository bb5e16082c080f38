"""Metrics for Prometheus."""

from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class ServiceMetrics:
    """The counters of a service, in their own registry."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)
        self.requests = Counter(
            "vramcast_requests_total", "Requests by path and status", ["path", "status"], registry=registry
        )
        self.seconds = Histogram(
            "vramcast_request_seconds", "Time to answer by path", ["path"], buckets=_SECONDS, registry=registry
        )
        self.cached = Counter(
            "vramcast_cache_lookups_total", "Lookups by cache and outcome", ["cache", "outcome"], registry=registry
        )
        self.traces = Counter("vramcast_traces_total", "Networks traced by outcome", ["outcome"], registry=registry)
        self.reloads = Counter(
            "vramcast_checkpoint_reloads_total", "Reloads by outcome", ["outcome"], registry=registry
        )
        self.observations = Counter(
            "vramcast_observations_total", "Observations by outcome", ["outcome"], registry=registry
        )
        self._timed: dict[tuple[str, int], tuple[Counter, Histogram]] = {}

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a gauge that is read on demand."""
        Gauge(name, text, registry=self.registry).set_function(read)

    def gauge(self, name: str) -> float:
        """Return the value of a gauge now."""
        return self.registry.get_sample_value(name) or 0.0

    def finished(self, path: str, status: int, seconds: float) -> None:
        """Count a request. Labelled counters are looked up once, since the lookup is most of their cost."""
        key = (path, status)
        if key not in self._timed:
            self._timed[key] = (self.requests.labels(path, str(status)), self.seconds.labels(path))
        count, timer = self._timed[key]
        count.inc()
        timer.observe(seconds)

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self.registry)
