"""Faults: bad requests, lost workers and damaged checkpoints."""

import asyncio
import json
import os
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from served import MLP, Scripted, Service, serving

from vramcast.collocation.service.loaded_checkpoint import Checkpoint
from vramcast.collocation.service.settings import Limits, Settings
from vramcast.collocation.service.worker_pool import (
    AbandonedError,
    LostError,
    OverloadedError,
    PoolError,
    PoolLimits,
    Waiters,
    WorkerPool,
)
from vramcast.errors import UserError
from vramcast.models.released import RELEASED
from vramcast.virtual_gpu.training.setup import parse_call


def run(scenario: Callable[[Service], Awaitable[None]], settings: Settings | None = None, **options: Any) -> None:
    async def whole() -> None:
        async with serving(settings, **options) as service:
            await scenario(service)
            assert (await service.post("/v1/classify", {"spec": MLP})).status == 200, "and it goes on"

    asyncio.run(whole())


MALFORMED = {
    "nothing": b"",
    "half": b'{"spec": ',
    "no text": b"\xff\xfe\x00",
    "a lone surrogate": b'{"name": "\\ud800"}',
    "nan": b'{"spec": {"family": NaN}}',
    "infinity": b'{"spec": {"family": -Infinity}}',
    "two values": b"{}{}",
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"spec":' * 20_000 + b"1" + b"}" * 20_000,
    "a huge number": b'{"spec": {"training": {"batch_size": ' + b"9" * 10_000 + b"}}}",
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize("path", ["/v1/classify", "/v1/placements", "/k8s/filter", "/k8s/mutate"])
def test_malformed_bodies_are_refused_with_a_sentence(body: bytes, path: str) -> None:
    async def scenario(service: Service) -> None:
        response = await service.post(path, body)
        assert response.status in (400, 422), response.body
        assert response.json["status"] == "error"
        assert "expected" in response.json["error"]
        assert len(response.body) < 2000

    run(scenario)


def changed(**parts: Any) -> dict[str, Any]:
    return {"spec": {**MLP, **parts}}


WRONG = {
    "a list": [],
    "a text": "mlp",
    "nothing in it": {},
    "two forms": {"spec": MLP, "name": "x"},
    "an unknown key": {"spec": MLP, "colour": "red"},
    "a number in quotes": changed(training={"batch_size": "8"}),
    "true for a number": changed(training={"batch_size": True}),
    "a batch of none": changed(training={"batch_size": 0}),
    "a huge batch": changed(training={"batch_size": 2**60}),
    "a family of files": changed(family="timm", network={"name": "resnet50"}),
    "code": changed(family="module", network={"path": "/etc/passwd:Net"}),
    "an optimizer with code": changed(training={"batch_size": 8, "optimizer": "__import__('os').system('true')"}),
    "a missing factor": changed(network={"arch": "pyramid"}),
    "a foreign factor": changed(network={**MLP["network"], "wings": 2}),
    "a factor of another type": changed(network={**MLP["network"], "depth": [[1]]}),
    "a network too deep": changed(network={**MLP["network"], "depth": 10**9}),
    "too many blocks": changed(
        family="template",
        network={"template": "resnet", "stages": [[64, 10**9]], "input_size": 32, "num_classes": 10},
    ),
    "a device that is not there": {"spec": MLP, "device": "abacus"},
    "a device outside": {"spec": MLP, "device": "../../etc/passwd"},
    "a risk of one": {"spec": MLP, "risk": 1},
    "no jobs": {"jobs": []},
    "too many jobs": {"jobs": [{"spec": MLP}] * 65},
    "jobs in jobs": {"jobs": [{"jobs": [{"spec": MLP}]}]},
    "a table without layers": {
        "table": {"layers": [], "trainable_shapes": [], "input_elements": 1},
        "training": {"batch_size": 1},
    },
}


@pytest.mark.parametrize("body", WRONG.values(), ids=WRONG)
def test_wrong_requests_are_refused_with_a_sentence(body: Any) -> None:
    async def scenario(service: Service) -> None:
        response = await service.post("/v1/classify", body)
        assert response.status == 422, response.body
        assert response.json["error"].startswith("expected")
        assert not [question for question in service.pool.asked if question.job.family not in ("mlp", "template")]

    run(scenario)


def test_a_body_with_too_large_a_content_length_is_refused_unread() -> None:
    async def scenario(service: Service) -> None:
        async def never() -> None:
            raise AssertionError("nobody reads it")

        response = await service.request("POST", "/v1/classify", [b"x"], {"content-length": "10000000000"}, never)
        assert (response.status, response.headers["connection"]) == (413, "close")

    run(scenario)


def test_a_body_without_a_content_length_is_read_up_to_the_limit() -> None:
    async def scenario(service: Service) -> None:
        response = await service.request("POST", "/v1/classify", [b" " * 1000] * 100, {})
        assert response.status == 413

    run(scenario, Settings(limits=Limits(body_bytes=5000)))


def test_a_slow_body_is_refused() -> None:
    async def scenario(service: Service) -> None:
        async def slow() -> None:
            await asyncio.sleep(0.04)

        response = await service.request("POST", "/v1/classify", [b" "] * 50, {}, slow)
        assert response.status == 408
        assert service.guard.in_flight == 0

    run(scenario, Settings(limits=Limits(body_seconds=0.1)))


def test_a_client_that_leaves_does_not_stay_in_flight() -> None:
    async def scenario(service: Service) -> None:
        scope = {"type": "http", "method": "POST", "path": "/v1/classify", "headers": [], "client": None}

        async def receive() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            raise AssertionError(message)

        await service.guard(scope, receive, send)
        assert service.guard.in_flight == 0

    run(scenario)


def test_unknown_paths_and_methods_are_problems_too() -> None:
    async def scenario(service: Service) -> None:
        missing = await service.get("/v1/everything")
        assert (missing.status, missing.json["status"]) == (404, "error")
        wrong = await service.request("DELETE", "/v1/classify", [b""], {})
        assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
        text = (await service.get("/metrics")).body.decode()
        assert 'path="other"' in text
        assert "everything" not in text, "a client cannot fill the metrics with names"

    run(scenario)


def test_other_content_types_than_json_are_refused() -> None:
    async def scenario(service: Service) -> None:
        body = json.dumps({"spec": MLP}).encode()
        assert (await service.post("/v1/classify", body)).status == 200
        assert (await service.post("/v1/classify", body, content_type="text/plain")).status == 422

    run(scenario)


def test_an_unexpected_error_is_a_problem_of_its_job_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Scripted):
        def answers(self, asked: Any) -> Any:
            if any(item.bucket_mib == 666 for item in asked):
                raise RuntimeError("a secret of the inside")
            return super().answers(asked)

    async def scenario(service: Service) -> None:
        bad, good = {"spec": MLP, "bucket_mib": 666}, {"spec": MLP}
        response = await service.post("/v1/classify", bad)
        assert (response.status, "RuntimeError" in response.json["error"]) == (422, True)
        assert b"secret" not in response.body
        answers = (await service.post("/v1/classify", {"jobs": [good, bad, good]})).json["answers"]
        assert [item["status"] for item in answers] == ["ok", "error", "ok"]

    run(scenario, load=Broken)
    assert "a secret of the inside" in caplog.text


@pytest.mark.parametrize("error", [OverloadedError(), PoolError("no room")])
def test_a_full_queue_of_traces_is_answered_with_503(error: Exception) -> None:
    async def scenario(service: Service) -> None:
        service.pool.error = error
        for body in ({"spec": MLP}, {"jobs": [{"spec": MLP}]}):
            response = await service.post("/v1/classify", body)
            assert (response.status, response.headers["retry-after"]) == (503, "1")
        service.pool.error = None

    run(scenario)


def test_a_refused_network_is_not_traced_twice() -> None:
    async def scenario(service: Service) -> None:
        service.pool.error = UserError("expected a network, found none: fix it")
        for _ in range(2):
            assert (await service.post("/v1/classify", {"spec": MLP, "device": "t4"})).status == 422
        assert len(service.pool.asked) == 1
        service.pool.error = None

    run(scenario)


def test_a_trace_that_was_lost_is_tried_again() -> None:
    async def scenario(service: Service) -> None:
        body = {"jobs": [{"spec": MLP, "device": "t4"}]}
        service.pool.error = LostError("expected a network that is traced in time, found a slower one")
        lost = await service.post("/v1/classify", body)
        assert lost.json["answers"][0]["status"] == "error"
        service.pool.error = None
        again = await service.post("/v1/classify", body)
        assert again.json["answers"][0]["status"] == "ok"

    run(scenario)


LIMITS = PoolLimits(waiting=64, seconds=20, abandoned_seconds=0.5, worker_bytes=1 << 30)


def with_pool(scenario: Callable[[WorkerPool], Awaitable[None]], module: str = "os", **limits: Any) -> None:
    async def whole() -> None:
        pool = WorkerPool(1, replace(LIMITS, **limits), module)
        await pool.start()
        try:
            await scenario(pool)
        finally:
            await pool.close()

    asyncio.run(whole())


def test_a_worker_that_hangs_or_dies_is_replaced() -> None:
    async def scenario(pool: WorkerPool) -> None:
        first = await pool.run(os.getpid)
        with pytest.raises(LostError, match="takes at most"):
            await pool.run(partial(time.sleep, 60))
        second = await pool.run(os.getpid)
        with pytest.raises(LostError, match="died"):
            await pool.run(partial(os._exit, 7))
        third = await pool.run(os.getpid)
        assert len({first, second, third}) == 3
        with pytest.raises(UserError, match="invalid literal"):
            await pool.run(partial(int, "seven"))
        with pytest.raises(UserError, match="Adam"):
            await pool.run(partial(parse_call, "Adam("))
        with pytest.raises(UserError, match="with a result of at most"):
            await pool.run(partial(bytes, 100 << 20))
        assert await pool.run(os.getpid) == third, "a refusal costs no worker"

    with_pool(scenario, seconds=1.0)


def test_more_calls_than_may_wait_are_refused() -> None:
    async def scenario(pool: WorkerPool) -> None:
        calls = [asyncio.create_task(pool.run(partial(time.sleep, 0.01))) for _ in range(6)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(item) for item in outcomes] == [type(None)] * 5 + [OverloadedError]
        assert pool.waiting == 0

    with_pool(scenario, waiting=4)


def test_a_call_that_nobody_waits_for_is_dropped_or_ended() -> None:
    async def scenario(pool: WorkerPool) -> None:
        process = await pool.run(os.getpid)
        waiters = Waiters()
        with waiters:
            running = asyncio.create_task(pool.run(partial(time.sleep, 60), waiters))
            await asyncio.sleep(0.05)
            queued = asyncio.create_task(pool.run(partial(time.sleep, 60)))
            await asyncio.sleep(0.05)
            queued.cancel()
        start = time.monotonic()
        assert await pool.run(os.getpid) != process
        assert time.monotonic() - start < 15, "neither of them was waited for"
        with pytest.raises(AbandonedError):
            await running

    with_pool(scenario)


def test_a_short_call_that_nobody_waits_for_is_finished() -> None:
    async def scenario(pool: WorkerPool) -> None:
        with (waiters := Waiters()):
            running = asyncio.create_task(pool.run(partial(os.path.join, "a", "b"), waiters))
            await asyncio.sleep(0)
        assert await running == "a/b"

    with_pool(scenario)


def test_a_worker_that_cannot_start_is_an_error_of_the_pool() -> None:
    async def scenario(pool: WorkerPool) -> None:
        with pytest.raises(PoolError):
            await pool.run(os.getpid)
        with pytest.raises(PoolError):
            await pool.run(os.getpid)

    with_pool(scenario, "no_such_module")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RELEASED / "universal", tmp_path / "mine"))


def test_a_deleted_or_damaged_checkpoint_still_answers(checkpoint: Path) -> None:
    weights = checkpoint / "weights.safetensors"
    whole = weights.read_bytes()

    async def ready(service: Service) -> tuple[str, str]:
        reply = await service.get("/readyz")
        assert str(checkpoint.parent) not in json.dumps(reply.json)
        return reply.json["status"], reply.json["checkpoint"]["on_disk"]

    async def scenario(service: Service) -> None:
        before = await service.post("/v1/classify", {"spec": MLP})
        assert before.json["checkpoint"] == "mine"
        assert await ready(service) == ("ready", "same")
        weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert await ready(service) == ("degraded", "damaged")
        with pytest.raises(UserError, match="sound checkpoint"):
            await service.engine.reload()
        shutil.rmtree(checkpoint)
        assert await ready(service) == ("degraded", "missing")
        assert (await service.get("/readyz")).json["notes"][-1].startswith("the last reload failed")
        answer = await service.post("/v1/classify", {"spec": MLP, "bucket_mib": 512})
        assert answer.status == 200, "from what was loaded"
        assert answer.json["estimate_mib"] == before.json["estimate_mib"]
        reload = await service.post("/v1/checkpoints/reload", b"", authorization="Bearer t")
        assert reload.status == 422
        assert str(checkpoint.parent) not in reload.body.decode(), "a client sees no path"
        shutil.copytree(RELEASED / "universal", checkpoint)
        await service.engine.reload()
        assert await ready(service) == ("ready", "same")

    async def with_token() -> None:
        async with serving(Settings(checkpoint=str(checkpoint), token="t"), load=Checkpoint) as service:
            post = service.post
            service.post = lambda path, body, **headers: post(path, body, **{"authorization": "Bearer t", **headers})  # type: ignore[method-assign]
            await scenario(service)

    asyncio.run(with_token())


def test_a_missing_checkpoint_fails_before_the_service_starts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="checkpoint"):
        asyncio.run(serving(Settings(checkpoint=str(tmp_path)), load=Checkpoint).__aenter__())


def test_a_reload_drops_no_request() -> None:
    async def scenario(service: Service) -> None:
        async def ask(index: int) -> int:
            return (await service.post("/v1/classify", {"spec": MLP, "bucket_mib": 64 + index})).status

        tasks = [asyncio.create_task(ask(index)) for index in range(200)]
        for _ in range(5):
            await service.engine.reload()
        assert set(await asyncio.gather(*tasks)) == {200}

    run(scenario)
