"""Attacks on the service: the memory and the work that a client can cause are bounded. See also `make soak`."""

import asyncio
import gc
import json
import re
import shutil
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from served import MLP, TABLE, Response, Scripted, Service, serving

from benchmarks.soak.mutated_requests import FAMILIES, mutated
from vramcast.collocation.service import kubernetes_routes
from vramcast.collocation.service.loaded_checkpoint import Checkpoint
from vramcast.collocation.service.settings import Limits, Settings
from vramcast.jobs.filters import check
from vramcast.models.released import RELEASED


def run(scenario: Callable[[Service], Awaitable[None]], settings: Settings | None = None, **options: Any) -> None:
    async def whole() -> None:
        async with serving(settings, **options) as service:
            await scenario(service)
            assert (await service.post("/v1/classify", {"spec": MLP})).status == 200, "it still answers"

    asyncio.run(whole())


def node(name: str, gpus: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "annotations": {"vramcast/gpus": json.dumps(gpus)}}}


def pod(job: Any, **annotations: str) -> dict[str, Any]:
    text = job if isinstance(job, str) else json.dumps(job)
    containers = [{"name": "c", "resources": {}}]
    metadata = {"name": "p", "annotations": {"vramcast/job": text, **annotations}}
    return {"metadata": metadata, "spec": {"containers": containers}}


def review(job: Any) -> dict[str, Any]:
    return {"request": {"uid": "u", "object": pod(job)}}


# --- memory ----------------------------------------------------------------------------------------------------------


def test_nodes_with_thousands_of_gpus_are_not_kept() -> None:
    gpu = {"id": "0", "free_mib": 1, "total_mib": 2}

    async def scenario(service: Service) -> None:
        for index in range(20):
            reply = await service.post("/k8s/nodes", {"items": [node(f"n{index}", [gpu] * 15_000)]})
            assert (reply.status, reply.json) == (200, {"known": 0})
        assert (await service.post("/k8s/nodes", {"items": [node("n", [gpu] * 8)]})).json == {"known": 1}

    run(scenario)


def test_the_memory_for_nodes_has_a_ceiling() -> None:
    gpus = [{"id": str(index), "free_mib": 1, "total_mib": 2} for index in range(100)]

    async def scenario(service: Service) -> None:
        for index in range(60):
            await service.post("/k8s/nodes", {"items": [node(f"n{index}-{item}", gpus) for item in range(10)]})
        registry = service.guard.app.state.nodes  # type: ignore[attr-defined]
        assert 0 < registry.size_bytes <= 1 << 20

    run(scenario, Settings(limits=Limits(node_registry_bytes=1 << 20)))


def test_layer_tables_of_refused_observations_are_not_kept() -> None:
    check.cache_clear()

    async def scenario(service: Service) -> None:
        deep = {**MLP, "network": {**MLP["network"], "depth": 2900}}
        reply = await service.post("/v1/observations", {"job": {"spec": deep}, "peak_mib": 1000})
        assert (reply.status, "layers" in reply.json["error"]) == (422, True)
        assert check.cache_info().currsize == 0

    run(scenario)


def test_bodies_in_flight_are_bounded_by_bytes() -> None:
    async def scenario(service: Service) -> None:
        service.pool.hold = asyncio.Event()
        body = json.dumps({"spec": MLP, "bucket_mib": 100}).encode()
        first = asyncio.create_task(service.post("/v1/classify", body + b" " * 600))
        await asyncio.sleep(0.01)
        assert (await service.post("/v1/classify", body + b" " * 601)).status == 503
        service.pool.hold.set()
        assert (await first).status == 200
        assert service.guard.in_flight_bytes == 0

    run(scenario, Settings(limits=Limits(in_flight_bytes=1000)))


def test_refused_bodies_are_not_kept_until_the_collector_runs() -> None:
    async def scenario(service: Service) -> None:
        gc.collect()
        gc.disable()  # as rare as the service makes it
        tracemalloc.start()
        try:
            for _ in range(64):
                assert (await service.post("/v1/classify", b"{" + b" " * (2**20 - 100))).status == 400
            kept_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            gc.enable()
        assert kept_bytes < 2**25

    run(scenario)


# --- time ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/classify", "/v1/observations", "/v1/slurm", "/k8s/filter", "/k8s/nodes"])
def test_large_bodies_are_parsed_outside_of_the_event_loop(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(service: Service) -> None:
        parsed: list[int] = []

        async def parse(function: Any) -> Any:
            parsed.append(len(function.args[1]))
            return function()

        monkeypatch.setattr(service.engine.parsers, "run", parse)
        body = json.dumps({"Pod": {}, "NodeNames": ["n" * 10_000], "items": []}).encode()
        await service.post(path, body)
        assert parsed == [len(body)]

    run(scenario)


def test_a_body_with_thousands_of_errors_is_refused_in_one_sentence() -> None:
    async def scenario(service: Service) -> None:
        training = {"batch_size": 1, **{f"key{index}": 1 for index in range(20_000)}}
        reply = await service.post("/v1/classify", {"spec": {**MLP, "training": training}})
        assert reply.status == 422
        assert "found 20000 errors" in reply.json["error"]

    run(scenario)


def test_the_work_of_one_request_is_bounded_by_layers_times_passes() -> None:
    spec = {**MLP, "network": {**MLP["network"], "depth": 700}, "training": {"batch_size": 8, "accumulate": 1024}}

    async def scenario(service: Service) -> None:
        reply = await service.post("/v1/classify", {"spec": spec})
        assert (reply.status, "lower accumulate" in reply.json["error"]) == (422, True)
        admitted = await service.post("/k8s/mutate", review(spec))
        assert admitted.json["response"]["allowed"]
        assert "lower accumulate" in admitted.json["response"]["warnings"][0]
        observed = await service.post("/v1/observations", {"job": {"spec": spec}, "peak_mib": 1000})
        assert observed.status == 422

    run(scenario)


async def leaving(service: Service, path: str, body: Any) -> Response:
    """Send a request whose client leaves as soon as the body is sent."""
    sent = []

    async def receive() -> dict[str, Any]:
        if not sent:
            sent.append(True)
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    response = Response()

    async def send(message: Any) -> None:
        response.status = message.get("status", response.status)

    headers = [(b"content-type", b"application/json")]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
        "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http", "headers": headers,
        "client": ("10.0.0.1", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip
    await service.guard(scope, receive, send)
    return response


@pytest.mark.parametrize("path", ["/v1/classify", "/k8s/mutate"])
def test_nobody_waits_for_the_work_of_a_client_that_left(path: str) -> None:
    async def scenario(service: Service) -> None:
        waiters: list[Any] = []
        service.pool.hold = asyncio.Event()
        inner = service.pool.run

        async def traced(function: Any, counted: Any = None) -> Any:
            waiters.append(counted)
            return await inner(function)

        service.pool.run = traced  # type: ignore[method-assign]
        body = review(MLP) if path == "/k8s/mutate" else {"spec": MLP}
        assert (await leaving(service, path, body)).status == 0, "nobody is there to receive a response"
        assert [item.count for item in waiters] == [0], "so the pool drops or ends it"
        assert service.guard.in_flight == 0
        service.pool.hold.set()

    run(scenario)


def test_the_search_for_the_largest_batch_ends_when_the_client_leaves() -> None:
    async def scenario(service: Service) -> None:
        await service.post("/v1/classify", {"spec": MLP, "device": "t4"})
        service.pool.hold = asyncio.Event()
        await leaving(service, "/v1/classify", {"spec": MLP, "device": "t4", "max_batch_size": True})
        traces = len(service.pool.asked)
        service.pool.hold.set()
        await asyncio.sleep(0.2)
        assert len(service.pool.asked) == traces, "no further batch is traced"

    run(scenario)


def test_bodies_beyond_a_limit_are_refused_and_the_others_are_read() -> None:
    async def scenario(service: Service) -> None:
        more = asyncio.Event()
        bodies = [
            asyncio.create_task(service.request("POST", "/v1/classify", [b" ", b" "], {}, more.wait)) for _ in range(12)
        ]
        await asyncio.sleep(0.01)
        assert len(service.guard.bodies) == 10
        assert (await service.post("/v1/classify", {"spec": MLP})).status == 503
        more.set()
        statuses = [item.status for item in await asyncio.gather(*bodies)]
        assert statuses.count(503) == 2
        assert (await service.post("/v1/classify", {"spec": MLP})).status == 200

    run(scenario, Settings(limits=Limits(reading_bodies=10)))


def test_requests_in_flight_beyond_a_limit_are_refused() -> None:
    async def scenario(service: Service) -> None:
        service.pool.hold = asyncio.Event()
        held = [
            asyncio.create_task(service.post("/v1/classify", {"spec": MLP, "bucket_mib": 100 + index}))
            for index in range(16)
        ]
        await asyncio.sleep(0.05)
        assert service.guard.in_flight == 14
        service.pool.hold.set()
        statuses = [item.status for item in await asyncio.gather(*held)]
        assert (statuses.count(200), statuses.count(503)) == (14, 2)

    run(scenario, Settings(limits=Limits(in_flight=14)))


# --- exceptions ------------------------------------------------------------------------------------------------------

ADAFACTOR = {"table": {**TABLE, "trainable_shapes": [[0, 10]]}, "training": {"batch_size": 1, "optimizer": "Adafactor"}}
MEMNET = "gpumemnet:input:{}_output:10_depth:3_arch:pyramid_batch:{}.out"
FAILING = {
    "a zero in a shape under Adafactor": ADAFACTOR,
    "an unhashable argument": {"spec": {**MLP, "training": {"batch_size": 1, "optimizer": "SGD(lr={[]})"}}},
    "a name with a zero": {"name": MEMNET.format(0, 64)},
    "a name with a batch of zero": {"name": MEMNET.format(784, 0)},
    "a name with a long number": {"name": MEMNET.format("9" * 200, 64)},
    "a name with a long batch": {"name": MEMNET.format(784, "9" * 200)},
}


@pytest.mark.parametrize("job", FAILING.values(), ids=FAILING)
def test_a_job_that_fails_is_a_problem_of_its_own(job: Any) -> None:
    async def scenario(service: Service) -> None:
        assert (await service.post("/v1/classify", job)).status in (200, 422)
        answers = (await service.post("/v1/classify", {"jobs": [{"spec": MLP}, job]})).json["answers"]
        assert answers[0]["status"] == "ok"
        peaks = [{"job": {"spec": MLP}, "peak_mib": 1000}, {"job": job, "peak_mib": 1000}]
        stored = await service.post("/v1/observations", {"observations": peaks})
        assert (stored.status, stored.json["answers"][0]["runs"]) == (200, 1)
        slurm = await service.post("/v1/slurm", json.dumps(job).encode(), content_type="text/plain")
        assert slurm.status in (200, 422)
        assert (await service.post("/k8s/mutate", review(job))).json["response"]["allowed"]
        reply = await service.post("/k8s/filter", {"Pod": pod(job), "NodeNames": ["a", "b"]})
        assert (reply.status, reply.json["NodeNames"]) == (200, ["a", "b"])

    run(scenario)


def test_an_overload_after_the_first_observation_was_stored_is_a_problem_of_its_own() -> None:
    async def scenario(service: Service) -> None:
        from vramcast.collocation.service.worker_pool import OverloadedError

        await service.post("/v1/classify", {"spec": MLP})  # its layers are known to be good
        service.engine.parsers.error = OverloadedError()
        other = {**MLP, "training": {"batch_size": 9}}
        peaks = [{"job": {"spec": item}, "peak_mib": 1000} for item in (MLP, other)]
        reply = await service.post("/v1/observations", {"observations": peaks})
        assert [item["status"] for item in reply.json["answers"]] == ["ok", "error"]
        assert (await service.post("/v1/observations", {"observations": peaks[1:]})).status == 503

    run(scenario)


AMOUNTS = ["Infinity", "-Infinity", "NaN", "9" * 400, "-1", "1e400", '"x"', "null", "[]", "true"]


@pytest.mark.parametrize("amount", AMOUNTS)
def test_impossible_amounts_of_a_node_are_ignored(amount: str) -> None:
    texts = {
        "vramcast/gpus": f'[{{"id": "0", "free_mib": {amount}, "total_mib": {amount}}}]',
        "hami.io/node-nvidia-register": f'[{{"id": "0", "devmem": {amount}, "type": "A100"}}]',
    }

    async def scenario(service: Service) -> None:
        for key, text in texts.items():
            item = {"metadata": {"name": "n", "annotations": {key: text}}}
            body = {"Pod": pod(MLP), "Nodes": {"items": [item]}}
            for path in ("/k8s/filter", "/k8s/prioritize", "/k8s/nodes"):
                assert (await service.post(path, {**body, "items": [item]})).status == 200
            assert (await service.post("/k8s/filter", body)).json["Error"] == ""

    run(scenario)


@pytest.mark.parametrize("error", [RuntimeError("x"), MemoryError(), RecursionError(), OverflowError()])
def test_kubernetes_and_slurm_fail_open_on_any_exception(error: Exception) -> None:
    class Broken(Scripted):
        def answers(self, asked: Any) -> Any:
            if any(item.risk == 0.25 for item in asked):
                raise error
            return super().answers(asked)

    job = {"spec": MLP, "risk": 0.25}
    args = {"Pod": pod(job), "NodeNames": ["a"]}
    task = {"task": {"Pod": pod(job)}, "node": {"Node": {"metadata": {"name": "a"}}}}

    async def scenario(service: Service) -> None:
        assert (await service.post("/k8s/filter", args)).json["NodeNames"] == ["a"]
        assert (await service.post("/k8s/prioritize", args)).json == [{"Host": "a", "Score": 0}]
        assert (await service.post("/k8s/mutate", review(job))).json["response"]["allowed"]
        assert (await service.post("/volcano/predicate", task)).json["code"] == 0
        nodes = {"task": task["task"], "nodes": [task["node"]]}
        assert (await service.post("/volcano/prioritize", nodes)).json["nodeScore"] == {"a": 0}
        slurm = await service.post("/v1/slurm", json.dumps(job).encode(), content_type="text/plain")
        assert slurm.status == 422, "the plugin lets the job pass"

    run(scenario, load=Broken)


def test_a_decision_about_many_gpus_is_made_outside_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_routes, "_INLINE_GPUS", 3)
    gpu = {"id": "0", "free_mib": 4000, "total_mib": 4000}

    async def scenario(service: Service) -> None:
        called = []
        call = service.engine.batcher.call

        async def counted(function: Any, *args: Any) -> Any:
            called.append(function)
            return await call(function, *args)

        monkeypatch.setattr(service.engine.batcher, "call", counted)
        body = {"Pod": pod(MLP), "Nodes": {"items": [node(name, [gpu, gpu]) for name in ("a", "b")]}}
        assert len((await service.post("/k8s/filter", body)).json["Nodes"]["items"]) == 2
        assert len(called) == 1

    run(scenario)


@pytest.mark.parametrize("family", FAMILIES)
def test_mutated_requests_are_never_answered_with_an_error_of_the_service(family: str) -> None:
    content_type = "text/plain" if family == "slurm" else "application/json"

    async def scenario(service: Service) -> None:
        for seed in range(60):
            path, body = mutated(family, seed)
            response = await service.post(path, body, content_type=content_type)
            assert response.status in (200, 400, 422), (path, body)

    run(scenario)


# --- a damaged checkpoint --------------------------------------------------------------------------------------------

DAMAGES = {
    "not a number": b'{"content": NaN}',
    "brackets": b"[" * 200_000,
    "nothing": b"",
    "no text": b"\xff\xfe",
    "a list": b"[]",
    "a number": b"1" * 10_000,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_record_of_the_estimator_is_degraded(damage: bytes, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(RELEASED / "universal", tmp_path / "mine"))

    async def whole() -> None:
        async with serving(Settings(checkpoint=str(checkpoint), token="t"), load=Checkpoint) as service:
            (checkpoint / "estimator.json").write_bytes(damage)
            ready = await service.get("/readyz")
            assert (ready.status, ready.json["status"]) == (200, "degraded")
            assert (await service.get("/v1/checkpoints", authorization="Bearer t")).status == 200
            reload = await service.post("/v1/checkpoints/reload", b"", authorization="Bearer t")
            assert reload.status == 422
            assert str(tmp_path).encode() not in ready.body + reload.body, "a client sees no path"
            assert (await service.post("/v1/classify", {"spec": MLP}, authorization="Bearer t")).status == 200

    asyncio.run(whole())


# --- the security policy ---------------------------------------------------------------------------------------------


def test_the_security_policy_names_tests_that_exist() -> None:
    tests = Path(__file__).parent
    policy = (tests.parent / "SECURITY.md").read_text(encoding="utf-8")
    sources = "".join(path.read_text(encoding="utf-8") for path in tests.glob("test_*.py"))
    names = re.findall(r"`(test_\w+)`", policy)
    assert len(names) > 15
    assert [name for name in names if f"def {name}(" not in sources] == []
