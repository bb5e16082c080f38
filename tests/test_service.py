"""The answers of the service, without a network connection and with a scripted estimator."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from served import GPUMEMNET, MLP, SIMULATED, TABLE, Scripted, Service, serving

from vramcast import models
from vramcast.collocation.service.loaded_checkpoint import Checkpoint
from vramcast.collocation.service.settings import Limits, Settings
from vramcast.device.profiles import device_names
from vramcast.jobs.families import make_spec
from vramcast.virtual_gpu.training.setup import TrainingSetup


def run(scenario: Callable[[Service], Awaitable[None]], settings: Settings | None = None, **options: Any) -> None:
    async def whole() -> None:
        async with serving(settings, **options) as service:
            await scenario(service)

    asyncio.run(whole())


def test_a_spec_is_answered() -> None:
    async def scenario(service: Service) -> None:
        response = await service.post("/v1/classify", {"spec": MLP, "device": "t4", "risk": 0.02, "distribution": True})
        assert response.status == 200, response.body
        assert response.json["status"] == "ok"
        assert (response.json["device"], response.json["risk"], response.json["batch_size"]) == ("t4", 0.02, 8)
        assert response.json["distribution"][0]["probability"] == 1.0
        assert response.json["verdict"] == "fits"

    run(scenario)


def test_every_training_option_is_accepted() -> None:
    async def scenario(service: Service) -> None:
        training = {"batch_size": 4, "cudnn_benchmark": True, "dtype": "bfloat16", "optimizer": "AdamW(fused=True)"}
        reply = await service.post("/v1/classify", {"spec": {**MLP, "training": training}})
        assert reply.status == 200, reply.body
        refused = await service.post("/v1/classify", {"spec": {**MLP, "training": {**training, "dtype": "int8"}}})
        assert refused.status == 422

    run(scenario)


def test_a_name_a_table_and_features_are_answered() -> None:
    async def scenario(service: Service) -> None:
        training = {"batch_size": 4, "optimizer": "SGD(momentum=0.9)"}
        for job in (
            {"name": GPUMEMNET},
            {"table": TABLE, "training": training},
            {"features": {"table": TABLE, "training": training, "simulated": SIMULATED}},
        ):
            response = await service.post("/v1/classify", job)
            assert response.status == 200, response.body
            assert response.json["estimate_mib"] > 0
        assert len(service.pool.asked) == 1, "only the name needs a trace"

    run(scenario)


def test_a_bad_job_does_not_fail_the_others_of_a_request() -> None:
    async def scenario(service: Service) -> None:
        bad = {**MLP, "network": {**MLP["network"], "arch": "spiral"}}
        jobs = [{"spec": MLP}, {"spec": bad}, {"name": GPUMEMNET}, {"name": "resnet50"}]
        response = await service.post("/v1/classify", {"jobs": jobs})
        assert response.status == 200
        assert [item["status"] for item in response.json["answers"]] == ["ok", "error", "ok", "error"]
        assert "spiral" in response.json["answers"][1]["error"]
        assert "operator prepared" in response.json["answers"][3]["error"]

    run(scenario)


def test_concurrent_jobs_share_a_forward_pass_and_equal_ones_a_trace() -> None:
    async def scenario(service: Service) -> None:
        service.pool.hold = asyncio.Event()
        jobs = [{"spec": MLP, "bucket_mib": 64 + index} for index in range(20)]
        tasks = [asyncio.create_task(service.post("/v1/classify", job)) for job in jobs]
        while not service.pool.asked:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        service.pool.hold.set()
        assert {item.status for item in await asyncio.gather(*tasks)} == {200}
        assert len(service.pool.asked) == 1
        assert sum(service.engine.checkpoint.batches) == 20
        assert max(service.engine.checkpoint.batches) > 1

    run(scenario)


def test_a_response_is_cached_until_the_checkpoint_is_reloaded() -> None:
    async def scenario(service: Service) -> None:
        first = await service.post("/v1/classify", {"spec": MLP})
        again = await service.post("/v1/classify", {"spec": MLP})
        assert first.body == again.body
        assert service.engine.checkpoint.batches == [1]
        await service.engine.reload()
        await service.post("/v1/classify", {"spec": MLP})
        assert service.engine.checkpoint.batches == [1], "the fresh one is asked"
        assert len(service.pool.asked) == 1, "what was traced stays true"
        metrics = (await service.get("/metrics")).body.decode()
        assert 'vramcast_cache_lookups_total{cache="responses",outcome="hit"} 1.0' in metrics

    run(scenario)


def test_the_largest_batch_is_searched_on_request() -> None:
    async def scenario(service: Service) -> None:
        wide = {**MLP, "network": {**MLP["network"], "input_features": 4096}}
        response = await service.post("/v1/classify", {"spec": wide, "max_batch_size": True, "device": "t4"})
        most = response.json["max_batch_size"]
        assert most > 1000
        spec = {**wide, "training": {"batch_size": most}}
        answer = (await service.post("/v1/classify", {"spec": spec, "device": "t4"})).json
        assert 0.5 * answer["capacity_mib"] < answer["safe_mib"] <= answer["capacity_mib"]

    run(scenario)


def test_placements_are_ranked_and_refusals_explained() -> None:
    async def scenario(service: Service) -> None:
        gpus = [
            {"id": "full", "free_mib": 10},
            {"id": "small", "free_mib": 100, "total_mib": 100},
            {"id": "roomy", "free_mib": 39000, "node": "n1"},
            {"id": "just", "free_mib": 5000, "device": "t4"},
        ]
        response = await service.post("/v1/placements", {"job": {"spec": MLP}, "gpus": gpus})
        assert response.status == 200, response.body
        assert [item["gpu"] for item in response.json["placements"]] == ["just", "roomy"]
        assert {item["gpu"]: item["for_good"] for item in response.json["refused"]} == {"full": False, "small": True}
        assert set(response.json["answers"]) == {"a100_40gb", "t4"}
        assert len(service.pool.asked) == 1, "one trace for all devices"
        most = await service.post("/v1/placements", {"job": {"spec": MLP}, "gpus": gpus, "policy": "most-free"})
        assert most.json["placements"][0]["gpu"] == "roomy"
        tight = await service.post("/v1/placements", {"job": {"spec": MLP}, "gpus": gpus, "margin_mib": 30000})
        assert [item["gpu"] for item in tight.json["placements"]] == ["roomy"]

    run(scenario)


def test_devices_checkpoints_health_page_and_schema_are_served() -> None:
    async def scenario(service: Service) -> None:
        devices = (await service.get("/v1/devices")).json
        assert [item["name"] for item in devices["devices"]] == device_names()
        assert devices["default"] == "a100_40gb"
        checkpoints = (await service.get("/v1/checkpoints")).json
        assert checkpoints["in_use"]["name"] == "universal"
        assert "universal" in checkpoints["released"]
        assert (await service.get("/healthz")).json == {"status": "ok"}
        assert (await service.get("/readyz")).json["status"] == "ready"
        page = await service.get("/")
        assert page.headers["content-type"].startswith("text/html")
        assert (await service.get("/openapi.json")).json["info"]["title"] == "vramcast"

    run(scenario)


def test_named_specs_are_traced_before_the_service_is_ready(tmp_path: Path) -> None:
    path = tmp_path / "known.jsonl"
    path.write_text(json.dumps({"name": "mine@8", "spec": MLP}) + "\n", encoding="utf-8")

    async def scenario(service: Service) -> None:
        assert len(service.pool.asked) == 1
        response = await service.post("/v1/classify", {"name": "mine@8"})
        assert response.json["target"] == "mine@8"
        assert len(service.pool.asked) == 1

    run(scenario, Settings(named_specs=path))


def test_slurm_is_answered_with_lines_of_text() -> None:
    async def scenario(service: Service) -> None:
        for text in (GPUMEMNET, json.dumps(MLP), json.dumps({"spec": MLP, "device": "t4"})):
            response = await service.post("/v1/slurm", text.encode(), content_type="text/plain")
            assert response.status == 200, response.body
            lines = dict(line.split("=") for line in response.body.decode().splitlines())
            assert int(lines["shards"]) == -(-int(lines["need_mib"]) // 1024)
            assert lines["verdict"] == "fits"
            again = await service.post("/v1/slurm", text.encode(), content_type="text/plain")
            assert (again.body, again.headers["content-type"]) == (response.body, response.headers["content-type"])
        refused = await service.post("/v1/slurm", b"\xff", content_type="text/plain")
        assert refused.status == 422

    run(scenario)


def test_a_tight_job_reserves_the_whole_device_and_no_more() -> None:
    spec = {**MLP, "training": {"batch_size": 2**24}}  # 10.5 GiB, and 21 to be safe, by the scripted estimator

    async def scenario(service: Service) -> None:
        text = json.dumps({"spec": spec, "device": "t4"}).encode()
        response = await service.post("/v1/slurm", text, content_type="text/plain")
        lines = dict(line.split("=") for line in response.body.decode().splitlines())
        assert (lines["verdict"], lines["shards"]) == ("tight", "15"), "of the 15 GiB of a T4"
        pod = {"metadata": {"name": "p", "annotations": {"vramcast/job": json.dumps(spec)}}}
        gpu = {"id": "0", "free_mib": 15360, "total_mib": 15360, "device": "t4"}
        nodes = [
            {"metadata": {"name": name, "annotations": {"vramcast/gpus": json.dumps([{**gpu, "free_mib": free}])}}}
            for name, free in (("idle", 15360), ("shared", 12000))
        ]
        args = {"Pod": pod, "Nodes": {"items": nodes}}
        filtered = (await service.post("/k8s/filter", args)).json
        assert [item["metadata"]["name"] for item in filtered["Nodes"]["items"]] == ["idle"]
        assert list(filtered["FailedNodes"]) == ["shared"], "it may be freed"

    run(scenario)


def test_paths_below_v1_need_the_token() -> None:
    async def scenario(service: Service) -> None:
        for header in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "secret"},
            {"authorization": "Basic secret"},
        ):
            response = await service.post("/v1/classify", {"spec": MLP}, **header)
            assert (response.status, response.headers["www-authenticate"]) == (401, "Bearer")
        assert (await service.post("/v1/classify", {"spec": MLP}, authorization="bearer secret")).status == 200
        assert (await service.get("/readyz")).status == 200
        assert (await service.get("/metrics")).status == 200
        reloaded = await service.post("/v1/checkpoints/reload", b"", authorization="Bearer secret")
        assert reloaded.status == 200

    run(scenario, Settings(token="secret"))


def test_reloading_over_http_needs_a_token() -> None:
    async def scenario(service: Service) -> None:
        assert (await service.post("/v1/checkpoints/reload", b"")).status == 403

    run(scenario)


def test_requests_are_logged_as_json_lines(caplog: pytest.LogCaptureFixture) -> None:
    from vramcast.collocation.service.logs import JsonLogFormatter

    caplog.set_level("INFO", logger="vramcast.service")

    async def scenario(service: Service) -> None:
        await service.get("/healthz")

    run(scenario)
    line = json.loads(JsonLogFormatter().format(next(item for item in caplog.records if item.message == "request")))
    assert (line["path"], line["status"], line["level"]) == ("/healthz", 200, "info")
    assert line["ms"] >= 0


def test_the_paths_of_kubernetes_can_be_disabled() -> None:
    async def scenario(service: Service) -> None:
        assert (await service.post("/k8s/filter", {})).status == 404

    run(scenario, Settings(kubernetes=False))


def test_overload_is_answered_with_503_and_retry_after() -> None:
    async def scenario(service: Service) -> None:
        service.pool.hold = asyncio.Event()
        held = [
            asyncio.create_task(service.post("/v1/classify", {"spec": MLP, "bucket_mib": 100 + i})) for i in range(3)
        ]
        await asyncio.sleep(0.01)
        refused = await service.post("/v1/classify", {"spec": MLP})
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert (await service.get("/readyz")).status == 200, "those who watch are answered"
        service.pool.hold.set()
        assert {item.status for item in await asyncio.gather(*held)} == {200}
        assert (await service.post("/v1/classify", {"spec": MLP})).status == 200

    run(scenario, Settings(limits=Limits(in_flight=3)))


def test_another_checkpoint_is_loaded_by_name() -> None:
    async def scenario(service: Service) -> None:
        response = await service.post("/v1/classify", {"spec": MLP})
        assert response.json["checkpoint"] == "other"

    run(scenario, Settings(checkpoint="other"), load=Scripted)


def test_the_released_estimator_gives_the_same_answers_over_http_and_in_python() -> None:
    spec = make_spec("mlp", MLP["network"], TrainingSetup(**MLP["training"]))
    expected = models.load("universal").classify_spec(spec, device="t4", risk=0.02).to_dict()

    async def scenario(service: Service) -> None:
        job = {"spec": MLP, "device": "t4", "risk": 0.02}
        response = (await service.post("/v1/classify", {**job, "distribution": True})).json
        shares = response.pop("distribution")
        assert (response.pop("need_mib"), response.pop("basis"), response.pop("observed")) == (
            response["safe_mib"], "forecast", None
        )  # fmt: skip
        assert {**response, "seconds": 0} == {**json.loads(json.dumps(expected)), "seconds": 0}
        assert sum(item["probability"] for item in shares) == pytest.approx(1, abs=0.02)
        likeliest = max(shares, key=lambda item: item["probability"])
        assert likeliest == pytest.approx(response["bucket"])
        jobs = [job, {**job, "device": "a100_40gb"}, job]
        training, most = {"batch_size": 2**24}, {**SIMULATED, "reserved_bytes": 2**50, "fits": False}
        beyond = {"features": {"table": {**TABLE, "input_elements": 2**40}, "training": training, "simulated": most}}
        absurd = await service.post("/v1/classify", beyond)
        assert (absurd.status, absurd.json["verdict"]) == (200, "does not fit")
        assert absurd.json["safe_mib"] <= 2**30, "a number still"
        many = (await service.post("/v1/classify", {"jobs": jobs})).json["answers"]
        assert [item["device"] for item in many] == ["t4", "a100_40gb", "t4"]
        assert many[0]["estimate_mib"] == pytest.approx(response["estimate_mib"])

    run(scenario, load=Checkpoint)
