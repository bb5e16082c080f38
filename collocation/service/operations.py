"""What operators see: forecasts against observations, by network and by user, since the service started."""

import datetime
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from vramcast.virtual_gpu.allocator.sizes import MIB

_FORECASTS = 10_000
"""Jobs whose forecasts are kept, of about 300 bytes each; the least recently answered are dropped first."""
_RUNS = 1000
_GROUPS = 50
_UNKNOWN = "not stated"


@dataclass(frozen=True)
class JobForecast:
    """The forecast of a job on a device."""

    target: str
    estimate_mib: float
    safe_mib: float


@dataclass(frozen=True)
class ObservedRun:
    """A run that a client reported, with the forecast of its job if there was one."""

    at: str
    target: str
    device: str
    user: str | None
    peak_mib: float
    estimate_mib: float | None
    safe_mib: float | None

    @property
    def is_too_low(self) -> bool:
        """True if the run took more than its forecast reserved."""
        return self.safe_mib is not None and self.peak_mib > self.safe_mib


class OperationsLog:
    """The latest forecasts and runs, in memory alone: names of networks and users are never written to the history."""

    def __init__(self) -> None:
        self._since = _now()
        self._forecasts: OrderedDict[bytes, JobForecast] = OrderedDict()
        self._runs: deque[ObservedRun] = deque(maxlen=_RUNS)

    def forecast(self, key: bytes, forecast: JobForecast) -> None:
        """Keep the forecast of a job on a device."""
        self._forecasts.pop(key, None)
        self._forecasts[key] = forecast
        while len(self._forecasts) > _FORECASTS:
            self._forecasts.popitem(last=False)

    def observe(self, key: bytes, target: str, device: str, peak_bytes: int, user: str | None) -> ObservedRun:
        """Add a run, and return it with the forecast of its job."""
        forecast = self._forecasts.get(key)
        run = ObservedRun(
            at=_now(),
            target=target,
            device=device,
            user=user,
            peak_mib=peak_bytes / MIB,
            estimate_mib=forecast.estimate_mib if forecast else None,
            safe_mib=forecast.safe_mib if forecast else None,
        )
        self._runs.appendleft(run)
        return run

    def to_json(self) -> dict[str, Any]:
        """Return runs, the latest first, and groups of them."""
        runs = list(self._runs)
        return {
            "since": self._since,
            "runs": [asdict(run) for run in runs],
            "forecast_runs": sum(run.safe_mib is not None for run in runs),
            "too_low": sum(run.is_too_low for run in runs),
            "users": _groups(runs, lambda run: run.user or _UNKNOWN),
            "networks": _groups(runs, lambda run: run.target),
        }


def _groups(runs: Iterable[ObservedRun], name_of: Callable[[ObservedRun], str]) -> list[dict[str, Any]]:
    """Return figures of the groups with the most runs."""
    groups: defaultdict[str, list[ObservedRun]] = defaultdict(list)
    for run in runs:
        groups[name_of(run)].append(run)
    largest = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))[:_GROUPS]
    return [{"name": name, **_figures(members)} for name, members in largest]


def _figures(runs: Sequence[ObservedRun]) -> dict[str, Any]:
    shares = [run.peak_mib / run.safe_mib for run in runs if run.safe_mib]
    return {
        "runs": len(runs),
        "too_low": sum(run.is_too_low for run in runs),
        "peak_mib": max(run.peak_mib for run in runs),
        "used_share": median(shares) if shares else None,
    }


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
