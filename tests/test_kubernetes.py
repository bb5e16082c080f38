"""The scheduler extender, the admission webhook and Volcano's plugin, with requests as they send them."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from json_patches import patched
from served import Service, serving
from sqlalchemy import text

from vramcast.collocation.adapters import kubernetes, pod_resources
from vramcast.collocation.adapters.pod_resources import Figures
from vramcast.collocation.placement import GpuState
from vramcast.collocation.service import approvals as approvals_module
from vramcast.collocation.service.approvals import Approvals
from vramcast.collocation.service.node_registry import NodeRegistry
from vramcast.collocation.service.settings import Settings
from vramcast.collocation.service.storage import Storage
from vramcast.collocation.service.storage_access import StorageAccess
from vramcast.errors import UserError

FIXTURES = Path(__file__).parent / "fixtures" / "kubernetes"


def recorded(name: str) -> Any:
    return json.loads((FIXTURES / f"{name}.json").read_text(encoding="utf-8"))


def run(scenario: Callable[[Service], Awaitable[None]], settings: Settings | None = None) -> None:
    async def whole() -> None:
        async with serving(settings) as service:
            await scenario(service)

    asyncio.run(whole())


def with_nodes(**change: Any) -> dict[str, Any]:
    return {**recorded("filter_names"), "NodeNames": None, "Nodes": {"items": recorded("nodes")["items"]}, **change}


def test_nodes_are_filtered_by_their_annotations() -> None:
    async def scenario(service: Service) -> None:
        response = (await service.post("/k8s/filter", with_nodes())).json
        assert [item["metadata"]["name"] for item in response["Nodes"]["items"]] == ["gpu-a", "gpu-b", "cpu-only"]
        assert response["NodeNames"] is None
        assert response["FailedNodes"] == {}
        assert list(response["FailedAndUnresolvableNodes"]) == ["gpu-c"], "its card is too small for good"
        assert response["Error"] == ""

    run(scenario)


def test_names_are_filtered_by_the_nodes_sent_before() -> None:
    async def scenario(service: Service) -> None:
        first = (await service.post("/k8s/filter", recorded("filter_names"))).json
        assert first["NodeNames"] == recorded("filter_names")["NodeNames"], "nothing is known: nothing is refused"
        assert (await service.post("/k8s/nodes", recorded("nodes"))).json == {"known": 3}
        response = (await service.post("/k8s/filter", recorded("filter_names"))).json
        assert (response["Nodes"], response["NodeNames"]) == (None, ["gpu-a", "gpu-b", "gpu-new"])

    run(scenario)


@pytest.mark.parametrize("spelling", [str.lower, str.upper, lambda key: key[0].lower() + key[1:]])
def test_keys_may_be_of_any_case(spelling: Callable[[str], str]) -> None:
    async def scenario(service: Service) -> None:
        body = {spelling(key): value for key, value in with_nodes().items()}
        response = (await service.post("/k8s/filter", body)).json
        assert len(response["Nodes"]["items"]) == 3

    run(scenario)


def test_a_full_node_may_be_freed_and_several_gpus_must_all_have_room() -> None:
    async def scenario(service: Service) -> None:
        body = with_nodes()
        body["Pod"]["metadata"]["annotations"] = {"vramcast/need-mib": "31000"}
        response = (await service.post("/k8s/filter", body)).json
        assert list(response["FailedNodes"]) == ["gpu-a"]
        assert response["FailedNodes"]["gpu-a"] == kubernetes.TOO_LITTLE_FREE
        body["Pod"]["metadata"]["annotations"] = {"vramcast/need-mib": "1000"}
        body["Pod"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] = "2"
        response = (await service.post("/k8s/filter", body)).json
        assert list(response["FailedNodes"]) == ["gpu-a"], "only one of its two has room"
        assert "gpu-b" in response["FailedAndUnresolvableNodes"], "only one of its two is healthy"

    run(scenario)


def test_nodes_are_scored_from_0_to_10_and_the_tightest_is_best() -> None:
    async def scenario(service: Service) -> None:
        body = with_nodes()
        body["Pod"]["metadata"]["annotations"] = {"vramcast/need-mib": "29000"}
        response = (await service.post("/k8s/prioritize", body)).json
        assert [item["Host"] for item in response] == ["gpu-a", "gpu-b", "gpu-c", "cpu-only"]
        scores = {item["Host"]: item["Score"] for item in response}
        assert scores == {"gpu-a": 10, "gpu-b": 9, "gpu-c": 0, "cpu-only": 0}

    run(scenario)


@pytest.mark.parametrize(
    "annotations", [{}, {"vramcast/job": "{"}, {"vramcast/job": "resnet50"}, {"vramcast/risk": "2"}]
)
def test_a_pod_without_a_figure_goes_everywhere(annotations: dict[str, str]) -> None:
    async def scenario(service: Service) -> None:
        body = with_nodes()
        body["Pod"]["metadata"]["annotations"] = annotations
        assert len((await service.post("/k8s/filter", body)).json["Nodes"]["items"]) == 4
        assert {item["Score"] for item in (await service.post("/k8s/prioritize", body)).json} == {0}

    run(scenario)


def test_bad_extender_arguments_are_an_error_that_can_be_ignored() -> None:
    async def scenario(service: Service) -> None:
        for body in ({}, {"Pod": 1}, {"Pod": {}, "Nodes": []}, {"Pod": {}, "NodeNames": [1]}):
            response = await service.post("/k8s/filter", body)
            assert response.status == 200
            assert "expected" in response.json["Error"]
            assert (await service.post("/k8s/prioritize", body)).json == []

    run(scenario)


def test_odd_annotations_of_nodes_are_ignored() -> None:
    for words in ("", "[", "[1]", '[{"id": 1}]', "a,b", "null"):
        for key in (kubernetes.GPUS, kubernetes.HAMI_GPUS):
            node = {"metadata": {"name": "n", "annotations": {key: words}}}
            assert not kubernetes.gpus_of(node, lambda _: None), (key, words)


def two_gpus(nodes: int, free_mib: float = 39_000) -> list[dict[str, Any]]:
    gpus = json.dumps([{"id": gpu, "free_mib": free_mib, "total_mib": 40_960} for gpu in "ab"])
    return [{"metadata": {"name": f"n{index}", "annotations": {kubernetes.GPUS: gpus}}} for index in range(nodes)]


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_gpu_is_not_approved_for_two_pods_before_the_first_uses_it(nodes: int) -> None:
    async def scenario(service: Service) -> None:
        places = []
        for number in range(3 * nodes):
            body = with_nodes(Nodes={"items": two_gpus(nodes)})
            body["Pod"]["metadata"] |= {"uid": f"pod{number}", "annotations": {"vramcast/need-mib": "30000"}}
            for _ in range(2):  # a pod may be tried again
                fitting = (await service.post("/k8s/filter", body)).json["Nodes"]["items"]
                scores = []
                if len(fitting) > 1:  # as kube-scheduler does
                    scores = (await service.post("/k8s/prioritize", {**body, "Nodes": {"items": fitting}})).json
                best = max(scores, key=lambda item: int(item["Score"]), default=None)
                place = best["Host"] if best else fitting[0]["metadata"]["name"] if fitting else None
            places.append(place)
        assert all(places.count(f"n{index}") == 2 for index in range(nodes)), places
        assert places.count(None) == nodes

    run(scenario)


def test_an_approval_ends_when_its_memory_is_in_use_or_after_a_time() -> None:
    now = [0.0]
    storage = Storage(None, 10)
    approvals = Approvals(StorageAccess(storage), "best-fit", seconds=120, clock=lambda: now[0])
    idle = GpuState("0", 39_000, 40_000)

    async def free_mib(stated_mib: float, pod: str = "other") -> float:
        gpus = (await approvals.subtracted(pod, {"n": [GpuState("0", stated_mib, 40_000)], "unknown": None}))["n"]
        return gpus[0].free_mib if gpus else -1

    async def scenario() -> None:
        assert await approvals.approve("first", 10_000, 1, "n", [idle])
        assert (await free_mib(39_000), await free_mib(39_000, "first")) == (29_000, 39_000)
        assert await free_mib(33_000) == 29_000, "it uses a part of it"
        assert await free_mib(29_000) == 29_000, "it uses all of it: nothing is subtracted twice"
        assert not await approvals.approve("large", 30_000, 1, "n", [idle]), "its room is taken"
        assert await approvals.approve("second", 20_000, 1, "n", [idle])
        assert await free_mib(39_000) == 9_000
        assert await approvals.approve("second", 5_000, 1, "n", [idle]), "in place of its first approval"
        assert await free_mib(39_000) == 24_000
        now[0] = 121
        assert await free_mib(39_000) == 39_000
        now[0] = 1000
        for number in range(300):
            await approvals.approve(f"pod{number}", 1, 1, "n", [idle])

    asyncio.run(scenario())
    with storage.reading() as connection:
        assert connection.execute(text("SELECT COUNT(*) FROM approved")).scalar_one() == 300, "ended ones are dropped"


def test_the_number_of_approvals_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approvals_module, "_MOST_ROWS", 150)
    storage = Storage(None, 10)
    approvals = Approvals(StorageAccess(storage), "best-fit")

    async def scenario() -> None:
        for number in range(400):
            await approvals.approve(f"pod{number}", 1, 1, "n", [GpuState("0", 39_000, 40_000)])

    asyncio.run(scenario())
    with storage.reading() as connection:
        assert connection.execute(text("SELECT COUNT(*) FROM approved")).scalar_one() == 150


def test_the_gpus_of_a_node_expire() -> None:
    now = [0.0]
    registry = NodeRegistry(seconds=60, clock=lambda: now[0])
    registry.put("a", [GpuState("0", 1, 2)])
    now[0] = 50
    registry.put("b", [])
    assert registry.get("a") == [GpuState("0", 1, 2)]
    now[0] = 70
    registry.put("c", [])
    assert (registry.get("a"), registry.get("b"), len(registry)) == (None, [], 2)


def test_the_node_registry_is_bounded_by_bytes() -> None:
    registry = NodeRegistry(limit_bytes=100_000)
    for index in range(1000):
        registry.put(f"node{index}", [GpuState(str(gpu), 1, 2) for gpu in range(index % 100)])
        assert registry.size_bytes <= 100_000
    assert 0 < len(registry) < 100
    for index in range(1000):
        registry.put(f"node{index}", [])
    assert registry.size_bytes <= 100_000


@pytest.mark.parametrize(
    ("resource", "key", "unit_mib"),
    [
        ("hami", "nvidia.com/gpumem", 1),
        ("volcano", "volcano.sh/vgpu-memory", 1),
        ("volcano-share", "volcano.sh/gpu-memory", 1),
        ("aliyun", "aliyun.com/gpu-mem", 1024),
    ],
)
def test_the_webhook_writes_what_a_scheduler_reads(resource: str, key: str, unit_mib: int) -> None:
    async def scenario(service: Service) -> None:
        review = recorded("admission_review")
        reply = (await service.post("/k8s/mutate", review)).json
        assert (reply["apiVersion"], reply["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
        assert reply["response"]["uid"] == review["request"]["uid"]
        assert (reply["response"]["allowed"], reply["response"]["patchType"]) == (True, "JSONPatch")
        pod = patched(review, reply)
        need_mib = int(pod["metadata"]["annotations"]["vramcast/need-mib"])
        limits = [item.get("resources", {}).get("limits", {}) for item in pod["spec"]["containers"]]
        amounts = [int(item[key]) for item in limits if key in item]
        assert amounts == [-(-need_mib // unit_mib)]
        if resource == "hami":
            assert key in limits[1], "the container that asks for the GPU"
        if resource == "volcano":
            assert limits[0]["volcano.sh/vgpu-number"] == "1", "the amount counts only beside a number"

    run(scenario, Settings(resource=resource))


def kai_review(**change: Any) -> Any:
    """Return a review of a pod that KAI reads: without a whole GPU, with its scheduler and queue."""
    review = recorded("admission_review")
    pod = review["request"]["object"]
    pod["metadata"]["labels"]["kai.scheduler/queue"] = "team-a"
    pod["spec"] |= {"schedulerName": "kai-scheduler", **change}
    pod["spec"]["containers"][1]["resources"] = {}
    return review


def test_the_webhook_writes_the_annotation_of_kai() -> None:
    async def scenario(service: Service) -> None:
        review = kai_review()
        review["request"]["object"]["metadata"]["annotations"][pod_resources.CONTAINER] = "train"
        reply = (await service.post("/k8s/mutate", review)).json
        pod = patched(review, reply)
        notes = pod["metadata"]["annotations"]
        assert notes["gpu-memory"] == notes["vramcast/need-mib"]
        assert notes["gpu-fraction-container-name"] == "train"
        assert pod["spec"] == review["request"]["object"]["spec"]
        assert "warnings" not in reply["response"]

    run(scenario, Settings(resource="kai"))


def test_the_webhook_writes_nothing_that_kai_refuses() -> None:
    async def scenario(service: Service) -> None:
        review = recorded("admission_review")  # with a limit of nvidia.com/gpu
        reply = (await service.post("/k8s/mutate", review)).json
        notes = patched(review, reply)["metadata"]["annotations"]
        assert "vramcast/need-mib" in notes
        assert "gpu-memory" not in notes
        assert "refuses gpu-memory beside nvidia.com/gpu" in reply["response"]["warnings"][0]
        reply = (await service.post("/k8s/mutate", kai_review(schedulerName="default-scheduler"))).json
        assert "expected schedulerName kai-scheduler" in reply["response"]["warnings"][0]
        review = kai_review()
        del review["request"]["object"]["metadata"]["labels"]
        reply = (await service.post("/k8s/mutate", review)).json
        assert "expected a label kai.scheduler/queue" in reply["response"]["warnings"][0]

    run(scenario, Settings(resource="kai"))


def test_reasons_are_the_same_for_all_nodes_and_requests() -> None:
    async def scenario(service: Service) -> None:
        body = with_nodes()
        body["Pod"]["metadata"]["annotations"] = {"vramcast/need-mib": "39000"}
        reasons = set()
        for free_mib in (100, 200, 300):
            gpu = {"id": "0", "free_mib": free_mib, "total_mib": 40960}
            for index, node in enumerate(body["Nodes"]["items"]):
                gpus = json.dumps([{**gpu, "free_mib": free_mib + index}])
                node["metadata"]["annotations"] = {kubernetes.GPUS: gpus}
            response = (await service.post("/k8s/filter", body)).json
            assert len(response["FailedNodes"]) == 4
            reasons |= set(response["FailedNodes"].values())
        assert reasons == {"node(s) had too little free GPU memory"}

    run(scenario)


def test_the_limits_that_a_pod_states_are_not_changed() -> None:
    review = recorded("admission_review")
    pod = review["request"]["object"]
    pod["spec"]["containers"][1]["resources"]["limits"]["nvidia.com/gpumem"] = "5"
    patch = pod_resources.patch_of(pod, Figures(900.5), "hami")
    assert [step["path"] for step in patch] == ["/metadata/annotations/vramcast~1need-mib"]
    assert patch[0]["value"] == "901"
    with pytest.raises(UserError, match="the resource"):
        pod_resources.patch_of(pod, Figures(1), "slurm")


def test_the_webhook_admits_pods_that_it_cannot_answer() -> None:
    async def scenario(service: Service) -> None:
        review = recorded("admission_review")
        review["request"]["object"]["metadata"]["annotations"]["vramcast/job"] = '{"family": "mlp"}'
        response = (await service.post("/k8s/mutate", review)).json["response"]
        assert response["allowed"]
        assert "patch" not in response
        assert "vramcast: expected" in response["warnings"][0]
        del review["request"]["object"]["metadata"]["annotations"]
        response = (await service.post("/k8s/mutate", review)).json["response"]
        assert response == {"uid": review["request"]["uid"], "allowed": True}
        assert (await service.post("/k8s/mutate", {"request": {}})).status == 422

    run(scenario)


def test_volcano_is_answered() -> None:
    async def scenario(service: Service) -> None:
        body = recorded("volcano_predicate")
        response = (await service.post("/volcano/predicate", body)).json
        assert response == {"status": "needs 12000 MiB, 8000 are free", "code": 1}
        body["task"]["Pod"]["metadata"]["annotations"]["vramcast/need-mib"] = "7000"
        assert (await service.post("/volcano/predicate", body)).json == {"status": "", "code": 0}
        scores = (await service.post("/volcano/prioritize", {"task": body["task"], "nodes": [body["node"]]})).json
        assert scores == {"nodeScore": {"gpu-a": 10.0}, "errorMessage": ""}
        assert (await service.post("/volcano/predicate", {"task": {}})).status == 422

    run(scenario)
