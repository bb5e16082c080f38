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
_RATIOS = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.35, 1.5, 2.0, 4.0)


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
        self.peak_ratio = Histogram(
            "vramcast_peak_to_estimate_ratio",
            "Observed peaks of forecast jobs, divided by their estimates",
            ["device"],
            buckets=_RATIOS,
            registry=registry,
        )
        self.forecast_runs = Counter(
            "vramcast_forecast_runs_total", "Observed runs by forecast", ["device", "forecast"], registry=registry
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

    def compared(self, device: str, peak_mib: float, estimate_mib: float | None, safe_mib: float | None) -> None:
        """Compare the peak of a run with the forecast of its job, if there was one."""
        if not estimate_mib or safe_mib is None:
            self.forecast_runs.labels(device, "none").inc()
            return
        self.peak_ratio.labels(device).observe(peak_mib / estimate_mib)
        self.forecast_runs.labels(device, "safe" if peak_mib <= safe_mib else "too low").inc()

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self.registry)
