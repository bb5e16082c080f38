"""A client for the service. Standard library alone: a scheduler imports it in milliseconds."""

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

_AGAIN = (408, 429, 502, 503, 504)
"""Answers after which the same question may be asked again."""
_LONGEST_WAIT = 5.0


class ServiceError(Exception):
    """Something other than an answer came back, or nothing did."""


class ServiceAwayError(ServiceError):
    """Nobody answered, however often it was tried."""


class RefusedError(ServiceError):
    """The service does not take the question; the sentence says why, and asking again will not help."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True)
class Estimate:
    """What to set aside for a job."""

    need_mib: float
    """The safe answer, or what the job took before and a margin, or the fallback."""
    estimate_mib: float | None
    verdict: str | None
    """'fits', 'tight' or 'does not fit' on its device, as forecast."""
    from_fallback: bool
    basis: str | None = None
    """'forecast' or 'observed'; None for the fallback."""
    answer: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """All that the service said: see /openapi.json."""


@dataclass(frozen=True)
class Placements:
    """Where a job fits, the policy's choice first."""

    gpus: tuple[str, ...]
    refused: Mapping[str, str]
    """The reason by GPU."""
    reply: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Observation:
    """What the service knows of a job that ran."""

    runs: int
    """A run may count twice, if it was told again because no answer came."""
    peak_mib: float | None
    """The highest; None where all was forgotten."""
    device: str


class Client:
    """Asks again after failures, waiting longer each time, and falls back on a figure of the caller's."""

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
        """The estimate for one job; the fallback, if there is one, where the service is away."""
        try:
            return _estimate(self._post("/v1/classify", job))
        except ServiceAwayError:
            if self._fallback_mib is None:
                raise
            return Estimate(self._fallback_mib, None, None, from_fallback=True)

    def classify_many(self, jobs: Sequence[Mapping[str, Any]]) -> list[Estimate | RefusedError]:
        """An estimate or a refusal for each job, in order."""
        try:
            found = self._post("/v1/classify", {"jobs": list(jobs)})["answers"]
        except ServiceAwayError:
            if self._fallback_mib is None:
                raise
            return [Estimate(self._fallback_mib, None, None, from_fallback=True) for _ in jobs]
        return [_estimate(item) if item["status"] == "ok" else RefusedError(422, item["error"]) for item in found]

    def place(
        self, job: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]], policy: str = "best-fit", margin_mib: float = 0
    ) -> Placements:
        """Where a job fits; by the fallback, if there is one, where the service is away: GPUs with most free first."""
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
        """Tell what a job took on one card; what is known of it now. There is no fallback: what is not told is lost."""
        return self._told({"job": dict(job), "device": device, "peak_mib": peak_mib})

    def forget(self, job: Mapping[str, Any], device: str | None = None) -> Observation:
        """Take back all that was told of a job on one card."""
        return self._told({"job": dict(job), "device": device, "forget": True})

    def _told(self, body: Mapping[str, Any]) -> Observation:
        reply = self._post("/v1/observations", body)
        return Observation(reply["runs"], reply["peak_mib"], reply["device"])

    def is_ready(self) -> bool:
        """Whether the service answers jobs now."""
        try:
            return bool(self._once("GET", "/readyz", None)["status"] in ("ready", "degraded"))
        except (ServiceError, _AgainError):
            return False

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        data = json.dumps(body, allow_nan=False).encode()
        for attempt in range(self._retries + 1):
            try:
                return self._once("POST", path, data)
            except _AgainError as error:
                if attempt == self._retries:
                    raise ServiceAwayError(
                        f"expected an answer of {self._url}, found {error}: see to the service"
                    ) from error
                # with jitter, lest all who were turned away come back at once
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
                found: dict[str, Any] = json.loads(response.read())
                return found
        except urllib.error.HTTPError as error:
            with error:
                sentence = _sentence(error.read())
                if error.code in _AGAIN:
                    raise _AgainError(
                        f"{error.code} ({sentence})", _seconds(error.headers.get("Retry-After"))
                    ) from error
                raise RefusedError(error.code, sentence) from error
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: something that is no JSON
            raise _AgainError(repr(error)) from error


class _AgainError(Exception):
    """Worth another try."""

    def __init__(self, what: str, after_seconds: float = 0.0) -> None:
        super().__init__(what)
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
