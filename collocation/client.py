"""A client of the service. Standard library alone, so that a scheduler imports it in milliseconds."""

import http.client
import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_RETRIED = (408, 429, 502, 503, 504)
"""Statuses after which a request is sent again."""
_LONGEST_WAIT = 5.0


class ServiceError(Exception):
    """The service sent no answer."""


class ServiceAwayError(ServiceError):
    """The service did not answer after all retries."""


class RefusedError(ServiceError):
    """The service refused a request; the message says why, and a retry would not help."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True)
class Estimate:
    """The need of a job."""

    need_mib: float
    """The safe answer, or the observed peak and a margin, or the fallback."""
    estimate_mib: float | None
    verdict: str | None
    """The forecast on its device: 'fits', 'tight' or 'does not fit'."""
    from_fallback: bool
    basis: str | None = None
    """'forecast' or 'observed'; None for the fallback."""
    answer: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The whole answer of the service: see /openapi.json."""


@dataclass(frozen=True)
class Placements:
    """The GPUs that a job fits on, the choice of the policy first."""

    gpus: tuple[str, ...]
    refused: Mapping[str, str]
    """Reasons by GPU."""
    reply: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Observation:
    """The history of a job in the service."""

    runs: int
    """A run counts twice if it was sent again because no response came."""
    peak_mib: float | None
    """The highest; None without observations."""
    device: str


class Client:
    """Sends requests with retries and exponential backoff, and falls back on a need of the caller's."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8080",
        *,
        token: str | None = None,
        timeout_seconds: float = 5.0,
        retries: int = 2,
        backoff_seconds: float = 0.1,
        fallback_mib: float | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise ValueError(f"expected a URL that begins with http:// or https://, found {url!r}: change it")
        self._url = url.rstrip("/")
        self._token = token
        self._timeout_seconds = timeout_seconds
        self._retries = retries
        self._backoff_seconds = backoff_seconds
        self._fallback_mib = fallback_mib
        self._sleep = sleep

    def classify(self, job: Mapping[str, Any]) -> Estimate:
        """Return the estimate for a job; if the service does not answer, the fallback."""
        try:
            return _estimate(self._post("/v1/classify", job))
        except ServiceAwayError:
            if self._fallback_mib is None:
                raise
            return Estimate(self._fallback_mib, None, None, from_fallback=True)

    def classify_many(self, jobs: Sequence[Mapping[str, Any]]) -> list[Estimate | RefusedError]:
        """Return an estimate or a refusal for each job, in order."""
        try:
            answers = self._post("/v1/classify", {"jobs": list(jobs)})["answers"]
        except ServiceAwayError:
            if self._fallback_mib is None:
                raise
            return [Estimate(self._fallback_mib, None, None, from_fallback=True) for _ in jobs]
        return [_estimate(item) if item["status"] == "ok" else RefusedError(422, item["error"]) for item in answers]

    def place(
        self, job: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]], policy: str = "best-fit", margin_mib: float = 0
    ) -> Placements:
        """Return the GPUs that a job fits on; if the service does not answer, by the fallback, most free first."""
        body = {"job": dict(job), "gpus": list(gpus), "policy": policy, "margin_mib": margin_mib}
        try:
            reply = self._post("/v1/placements", body)
        except ServiceAwayError:
            if self._fallback_mib is None:
                raise
            need = self._fallback_mib + margin_mib
            fitting = sorted((gpu for gpu in gpus if gpu["free_mib"] >= need), key=lambda gpu: -gpu["free_mib"])
            refused = {str(gpu["id"]): f"needs {need:.0f} MiB" for gpu in gpus if gpu["free_mib"] < need}
            return Placements(tuple(str(gpu["id"]) for gpu in fitting), refused)
        refused = {item["gpu"]: item["reason"] for item in reply["refused"]}
        return Placements(tuple(item["gpu"] for item in reply["placements"]), refused, reply)

    def observe(self, job: Mapping[str, Any], peak_mib: float, device: str | None = None) -> Observation:
        """Report the peak of a job on one GPU, and return its history. There is no fallback."""
        return self._observe({"job": dict(job), "device": device, "peak_mib": peak_mib})

    def forget(self, job: Mapping[str, Any], device: str | None = None) -> Observation:
        """Remove all observations of a job on a device."""
        return self._observe({"job": dict(job), "device": device, "forget": True})

    def _observe(self, body: Mapping[str, Any]) -> Observation:
        reply = self._post("/v1/observations", body)
        return Observation(reply["runs"], reply["peak_mib"], reply["device"])

    def is_ready(self) -> bool:
        """Return True if the service answers jobs now."""
        try:
            return bool(self._once("GET", "/readyz", None)["status"] in ("ready", "degraded"))
        except (ServiceError, _RetryError):
            return False

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        data = json.dumps(body, allow_nan=False).encode()
        for attempt in range(self._retries + 1):
            try:
                return self._once("POST", path, data)
            except _RetryError as error:
                if attempt == self._retries:
                    raise ServiceAwayError(
                        f"expected an answer of {self._url}, found {error}: check the service"
                    ) from error
                # with jitter, so that refused clients do not all come back at once
                wait = self._backoff_seconds * 2**attempt * (0.5 + random.random())  # noqa: S311 - no secret
                self._sleep(min(max(wait, error.after_seconds), _LONGEST_WAIT))
        raise AssertionError("the loop above returns or raises")

    def _once(self, method: str, path: str, data: bytes | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        request = urllib.request.Request(self._url + path, data, headers, method=method)  # noqa: S310 - http, above
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_seconds) as response:  # noqa: S310
                reply: dict[str, Any] = json.loads(response.read())
                return reply
        except urllib.error.HTTPError as error:
            with error:
                sentence = _sentence(error.read())
                if error.code in _RETRIED:
                    raise _RetryError(
                        f"{error.code} ({sentence})", _seconds(error.headers.get("Retry-After"))
                    ) from error
                raise RefusedError(error.code, sentence) from error
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: not JSON
            raise _RetryError(repr(error)) from error


class _RetryError(Exception):
    """A failure after which the request is sent again."""

    def __init__(self, reason: str, after_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.after_seconds = after_seconds


def _estimate(answer: Mapping[str, Any]) -> Estimate:
    return Estimate(
        answer["need_mib"],
        answer["estimate_mib"],
        answer["verdict"],
        from_fallback=False,
        basis=answer["basis"],
        answer=answer,
    )


def _sentence(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


def _seconds(text: str | None) -> float:
    return float(text) if text and text.isdecimal() else 0.0
