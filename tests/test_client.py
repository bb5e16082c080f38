"""The client: typed answers, retries and a fallback."""

import json
import subprocess
import sys
from typing import Any

import pytest
from loopback import loopback

from vramcast.collocation.client import Client, RefusedError, ServiceAwayError

ANSWER = {"status": "ok", "need_mib": 700.0, "estimate_mib": 600.0, "verdict": "fits", "basis": "forecast"}
GOOD = (200, json.dumps(ANSWER).encode())
BUSY = (503, b'{"status": "error", "error": "come back"}')
JOB = {"name": "x"}


def client(url: str, **options: Any) -> tuple[Client, list[float]]:
    waits: list[float] = []
    return Client(url, sleep=waits.append, **options), waits


def test_an_answer_becomes_an_estimate() -> None:
    with loopback(GOOD) as service:
        result = client(service.url, token="t")[0].classify(JOB)
    assert (result.need_mib, result.estimate_mib, result.verdict, result.from_fallback) == (700.0, 600.0, "fits", False)
    assert result.basis == "forecast"
    path, body, headers = service.asked[0]
    assert (path, json.loads(body), headers["Authorization"]) == ("/v1/classify", JOB, "Bearer t")


def test_a_busy_service_is_retried_after_its_retry_after() -> None:
    with loopback(BUSY, BUSY, GOOD, headers={"Retry-After": "2"}) as service:
        one, waits = client(service.url)
        assert one.classify(JOB).need_mib == 700.0
    assert len(service.asked) == 3
    assert all(wait >= 2 for wait in waits), "as the service asks"


def test_the_waits_between_retries_grow() -> None:
    with loopback(BUSY) as service, pytest.raises(ServiceAwayError, match="come back"):
        one, waits = client(service.url, retries=4, backoff_seconds=0.1)
        one.classify(JOB)
    assert len(waits) == 4
    assert waits[3] > waits[0]


def test_a_refusal_is_not_retried_and_has_no_fallback() -> None:
    with loopback((422, b'{"status": "error", "error": "expected a spec, found none"}')) as service:
        one, waits = client(service.url, fallback_mib=1.0)
        with pytest.raises(RefusedError, match="expected a spec") as caught:
            one.classify(JOB)
    assert caught.value.status == 422
    assert waits == []


def test_the_fallback_replaces_a_service_that_does_not_answer() -> None:
    with loopback(GOOD) as service:
        url = service.url
    one, waits = client(url, fallback_mib=5120)
    result = one.classify(JOB)
    assert (result.need_mib, result.from_fallback, len(waits)) == (5120, True, 2)
    assert [item.need_mib for item in one.classify_many([JOB, JOB])] == [5120, 5120]  # type: ignore[union-attr]
    gpus = [{"id": "a", "free_mib": 6000}, {"id": "b", "free_mib": 9000}, {"id": "c", "free_mib": 100}]
    placed = one.place(JOB, gpus)
    assert (placed.gpus, list(placed.refused)) == (("b", "a"), ["c"])
    assert not one.is_ready()
    with pytest.raises(ServiceAwayError):
        client(url)[0].classify(JOB)


@pytest.mark.parametrize("answer", [b"", b"<html>", b"[1"])
def test_a_response_that_is_not_json_is_retried(answer: bytes) -> None:
    with loopback((200, answer)) as service:
        assert client(service.url, fallback_mib=1)[0].classify(JOB).from_fallback


def test_a_service_that_hangs_times_out() -> None:
    with loopback(GOOD, delay_seconds=0.5) as service:
        assert client(service.url, fallback_mib=1, timeout_seconds=0.05, retries=0)[0].classify(JOB).from_fallback


def test_several_jobs_and_placements_are_parsed() -> None:
    many = {"answers": [ANSWER, {"status": "error", "error": "expected less"}]}
    placed = {"placements": [{"gpu": "1"}, {"gpu": "0"}], "refused": [{"gpu": "2", "reason": "full"}]}
    with loopback((200, json.dumps(many).encode()), (200, json.dumps(placed).encode())) as service:
        one = client(service.url)[0]
        first, second = one.classify_many([JOB, JOB])
        assert not isinstance(first, RefusedError)
        assert first.need_mib == 700.0
        assert isinstance(second, RefusedError)
        result = one.place(JOB, [{"id": "0", "free_mib": 1}], policy="most-free")
    assert (result.gpus, result.refused) == (("1", "0"), {"2": "full"})
    assert json.loads(service.asked[1][1])["policy"] == "most-free"


def test_an_observation_is_retried_if_no_response_came() -> None:
    reply = {"status": "ok", "device": "t4", "runs": 2, "peak_mib": 900.0}
    with loopback(BUSY, (200, json.dumps(reply).encode())) as service:
        result = client(service.url)[0].observe(JOB, 900, "t4")
    assert (result.runs, result.peak_mib, result.device) == (2, 900.0, "t4")
    assert [json.loads(body) for _, body, _ in service.asked] == [{"job": JOB, "device": "t4", "peak_mib": 900}] * 2
    with loopback((507, b'{"status": "error", "error": "expected to store it"}')) as service:
        one, waits = client(service.url, fallback_mib=1)
        with pytest.raises(RefusedError, match="expected to store"):
            one.observe(JOB, 900)
    assert waits == []


def test_other_urls_are_refused() -> None:
    with pytest.raises(ValueError, match="http"):
        Client("file:///etc/passwd")


def test_importing_it_imports_nothing_heavy() -> None:
    heavy = {"torch", "numpy", "fastapi", "vramcast.models"}
    code = f"import sys, vramcast.collocation.client; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
