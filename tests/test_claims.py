"""Dynamic resource allocation, KAI's container keys, and workloads of several pods, by the admission webhook."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from json_patches import patched
from served import MLP, Service, serving

from vramcast.collocation.adapters.claims import GPU_CLASS, template_of
from vramcast.collocation.service import webhook
from vramcast.collocation.service.cluster_api import ClusterApi
from vramcast.collocation.service.settings import Settings
from vramcast.device.profiles import device_names, load_profile
from vramcast.virtual_gpu.allocator.sizes import MIB

JOB = {"vramcast/job": json.dumps(MLP)}
GPU = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
MEMORY = "device.capacity[device.driver].memory"


def review(kind: str, thing: dict[str, Any], **change: Any) -> dict[str, Any]:
    return {"request": {"uid": "u1", "kind": {"kind": kind}, "namespace": "team-a", "object": thing, **change}}


def claim(*requests: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    return {
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"name": "gpu", "annotations": JOB, **metadata}, "spec": {"devices": {"requests": list(requests)}},
    }  # fmt: skip


def exactly(name: str = "gpu", **fields: Any) -> dict[str, Any]:
    return {"name": name, "exactly": {"deviceClassName": GPU_CLASS, **fields}}


def pod(**spec: Any) -> dict[str, Any]:
    containers = [{"name": "train", "image": "pytorch/pytorch"}]
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "train", "annotations": JOB},
        "spec": {"containers": containers, **spec},
    }  # fmt: skip


def run(scenario: Callable[[Service], Awaitable[None]], resource: str = "dra") -> None:
    async def whole() -> None:
        async with serving(Settings(resource=resource)) as service:
            await scenario(service)

    asyncio.run(whole())


def asked_of(thing: Any) -> list[Any]:
    """Return the requests of a claim or a template, with the alternatives in place of those that have some."""
    spec = thing["spec"]["spec"] if thing["kind"] == "ResourceClaimTemplate" else thing["spec"]
    requests = spec["devices"]["requests"]
    return [other for item in requests for other in item.get("firstAvailable", [item.get("exactly")])]


@pytest.mark.parametrize("kind", ["ResourceClaim", "ResourceClaimTemplate"])
def test_a_claim_without_an_amount_gets_the_safe_figure(kind: str) -> None:
    async def scenario(service: Service) -> None:
        thing = claim(exactly(count=2)) | {"kind": kind}
        if kind == "ResourceClaimTemplate":
            thing["spec"] = {"spec": thing["spec"]}
        after = patched(asked := review(kind, thing), (await service.post("/k8s/mutate", asked)).json)
        kubernetes_validate.validate(after, "1.36", strict=True)
        need_mib = after["metadata"]["annotations"]["vramcast/need-mib"]
        (request,) = asked_of(after)
        assert request["capacity"] == {"requests": {"memory": f"{need_mib}Mi"}}
        assert int(need_mib) > 100
        assert request["count"] == 2, "the figure is that of each GPU"
        expression = request["selectors"][0]["cel"]["expression"]
        assert expression == f'!has({MEMORY}) || {MEMORY}.compareTo(quantity("{need_mib}Mi")) >= 0'

    run(scenario)


def test_amounts_and_other_classes_of_a_claim_are_left_alone() -> None:
    async def scenario(service: Service) -> None:
        own = exactly("own", capacity={"requests": {"memory": "5Gi"}})
        nic = {"name": "nic", "exactly": {"deviceClassName": "nic.example.com"}}
        cores = exactly("cores", capacity={"requests": {"cores": "20"}}, selectors=[{"cel": {"expression": "true"}}])
        either = {"name": "any", "firstAvailable": [{"name": "a", "deviceClassName": GPU_CLASS}]}
        asked = review("ResourceClaim", claim(own, nic, cores, either))
        after = patched(asked, (await service.post("/k8s/mutate", asked)).json)
        kubernetes_validate.validate(after, "1.36", strict=True)
        first, second, third, fourth = asked_of(after)
        assert (first, second) == (own["exactly"], nic["exactly"])
        assert third["capacity"]["requests"] == {"cores": "20", "memory": fourth["capacity"]["requests"]["memory"]}
        assert [len(item["selectors"]) for item in (third, fourth)] == [2, 1]
        again = (await service.post("/k8s/mutate", review("ResourceClaim", after))).json["response"]
        assert again == {"uid": "u1", "allowed": True}, "a second call changes nothing"
        asked = review("ResourceClaim", claim(nic))
        response = (await service.post("/k8s/mutate", asked)).json["response"]
        assert "found ['nic.example.com']: see --device-class" in response["warnings"][0]

    run(scenario)


@pytest.mark.parametrize("spec", [{}, {"devices": None}, {"devices": {"requests": {}}}, {"devices": {"requests": [1]}}])
def test_an_odd_claim_is_admitted(spec: Any) -> None:
    async def scenario(service: Service) -> None:
        thing = claim() | {"spec": spec}
        response = (await service.post("/k8s/mutate", review("ResourceClaim", thing))).json["response"]
        assert response["allowed"]
        assert "patch" not in response

    run(scenario)


class ApiServer:
    """An API server that makes templates, or answers with a status."""

    def __init__(self, account: Path) -> None:
        (account / "token").write_text("secret\n")
        self.made: list[tuple[str, Any]] = []
        self.status = 201
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert self.headers["Authorization"] == "Bearer secret"
                outer.made.append((self.path, body))
                self.send_response(outer.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Log nothing."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.api = ClusterApi(f"http://127.0.0.1:{self.server.server_port}", account)


@contextmanager
def api_server(account: Path) -> Iterator[ApiServer]:
    server = ApiServer(account)
    thread = threading.Thread(target=server.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.api.close()
        server.server.shutdown()
        server.server.server_close()
        thread.join(5)


def test_a_pod_that_asks_by_annotation_gets_a_template(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        with api_server(tmp_path) as cluster:
            service.guard.app.state.cluster_api = cluster.api  # type: ignore[attr-defined]
            thing = pod()
            thing["metadata"]["annotations"] = JOB | {"vramcast/gpu-count": "4"}
            asked = review("Pod", thing)
            for status in (201, 409):  # made, and there already
                cluster.status = status
                after = patched(asked, (await service.post("/k8s/mutate", asked)).json)
            kubernetes_validate.validate(after, "1.36", strict=True)
            path, template = cluster.made[0]
            assert path == "/apis/resource.k8s.io/v1/namespaces/team-a/resourceclaimtemplates"
            kubernetes_validate.validate(template, "1.36", strict=True)
            (request,) = asked_of(template)
            amount = int(request["capacity"]["requests"]["memory"].removesuffix("Mi"))
            assert request["count"] == 4
            assert 0 <= amount - int(after["metadata"]["annotations"]["vramcast/need-mib"]) < 128
            (reference,) = after["spec"]["resourceClaims"]
            assert reference["resourceClaimTemplateName"] == template["metadata"]["name"]
            assert after["spec"]["containers"][0]["resources"]["claims"] == [{"name": reference["name"]}]
            again = patched(review("Pod", after), (await service.post("/k8s/mutate", review("Pod", after))).json)
            assert again["spec"] == after["spec"], "a second call adds no claim"
            before = len(cluster.made)
            await service.post("/k8s/mutate", review("Pod", thing, dryRun=True))
            assert len(cluster.made) == before

    run(scenario)


@pytest.mark.parametrize("device", device_names())
def test_a_template_for_a_whole_device_fits_it(device: str) -> None:
    profile = load_profile(device)
    (request,) = asked_of(template_of(profile.available_bytes / MIB, 1, GPU_CLASS))
    assert int(request["capacity"]["requests"]["memory"].removesuffix("Mi")) <= profile.total_mib


def test_a_pod_without_a_template_is_admitted_unchanged(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        async def warning() -> str:
            response = (await service.post("/k8s/mutate", review("Pod", pod()))).json["response"]
            assert "patch" not in response
            return str(response["warnings"][0])

        assert "account of the cluster" in await warning()
        with api_server(tmp_path) as cluster:
            service.guard.app.state.cluster_api = cluster.api  # type: ignore[attr-defined]
            cluster.status = 403
            assert "status 403: check the service's role" in await warning()
            cluster.status = 201
            assert "patch" in (await service.post("/k8s/mutate", review("Pod", pod()))).json["response"]
            cluster.server.server_close()
            cluster.api._url = "http://127.0.0.1:1"
            assert "URLError" in await warning()
            assert "none a moment ago" in await warning(), "the circuit breaker is open"

    run(scenario)


def test_a_pod_with_a_whole_gpu_gets_no_second_one() -> None:
    async def scenario(service: Service) -> None:
        thing = pod(containers=[{"name": "train", "image": "i", **GPU}])
        asked = review("Pod", thing)
        reply = (await service.post("/k8s/mutate", asked)).json
        assert patched(asked, reply)["spec"] == thing["spec"]
        assert "remove the limit nvidia.com/gpu" in reply["response"]["warnings"][0]

    run(scenario)


def test_a_slow_figure_is_a_warning_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "ANSWER_SECONDS", 0.05)

    async def scenario(service: Service) -> None:
        service.pool.hold = asyncio.Event()
        response = (await service.post("/k8s/mutate", review("Pod", pod()))).json["response"]
        assert response["allowed"]
        assert "found none: create it again" in response["warnings"][0]

    run(scenario)


def test_kai_gets_the_estimate_and_the_bound_of_a_container() -> None:
    async def scenario(service: Service) -> None:
        thing = pod(schedulerName="kai-scheduler")
        thing["metadata"]["labels"] = {"kai.scheduler/queue": "team-a"}
        asked = review("Pod", thing)
        reply = (await service.post("/k8s/mutate", asked)).json
        notes = patched(asked, reply)["metadata"]["annotations"]
        amounts = [notes[f"nvidia.com/container.train.gpu-memory.{name}"] for name in ("request", "limit")]
        estimate, bound = (int(text.removesuffix("Mi")) for text in amounts)
        assert bound == int(notes["vramcast/need-mib"])
        assert estimate == -(-bound // 2), "the scripted estimator's safe figure is twice its estimate"
        assert "warnings" not in reply["response"]

    run(scenario, "kai-container")


def template(name: str, **extra: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": name, "image": "i", **extra}]}}


WORKER, HEAD = template("worker", **GPU), template("head")
WORKLOADS = {
    "Job": ({"template": WORKER}, ["/template"]),
    "PyTorchJob": (
        {"pytorchReplicaSpecs": {"Master": {"template": WORKER}, "Worker": {"replicas": 3, "template": WORKER}}},
        ["/pytorchReplicaSpecs/Master/template", "/pytorchReplicaSpecs/Worker/template"],
    ),
    "MPIJob": (
        {"mpiReplicaSpecs": {"Launcher": {"template": HEAD}, "Worker": {"template": WORKER}}},
        ["/mpiReplicaSpecs/Worker/template"],
    ),
    "JobSet": (
        {"replicatedJobs": [{"name": "w", "template": {"spec": {"parallelism": 2, "template": WORKER}}}]},
        ["/replicatedJobs/0/template/spec/template"],
    ),
    "LeaderWorkerSet": (
        {"leaderWorkerTemplate": {"size": 4, "leaderTemplate": WORKER, "workerTemplate": WORKER}},
        ["/leaderWorkerTemplate/leaderTemplate", "/leaderWorkerTemplate/workerTemplate"],
    ),
    "RayJob": (
        {"rayClusterSpec": {"headGroupSpec": {"template": HEAD}, "workerGroupSpecs": [{"template": WORKER}]}},
        ["/rayClusterSpec/workerGroupSpecs/0/template"],
    ),
}


def at(thing: Any, path: str) -> Any:
    for step in path.strip("/").split("/"):
        thing = thing[int(step) if isinstance(thing, list) else step]
    return thing


@pytest.mark.parametrize("kind", WORKLOADS)
def test_each_rank_of_a_workload_gets_its_figure(kind: str) -> None:
    spec, paths = WORKLOADS[kind]

    async def scenario(service: Service) -> None:
        thing = {"kind": kind, "metadata": {"name": "gang", "annotations": JOB}, "spec": spec}
        asked = review(kind, thing)
        after = patched(asked, (await service.post("/k8s/mutate", asked)).json)
        for path in paths:
            found = at(after["spec"], path)
            limits = found["spec"]["containers"][0]["resources"]["limits"]
            assert limits["nvidia.com/gpumem"] == found["metadata"]["annotations"]["vramcast/need-mib"]
            kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", **found}, "1.36", strict=True)
        assert json.dumps(after).count("nvidia.com/gpumem") == len(paths), "pods without a GPU are left alone"

    run(scenario, "hami")


def test_a_rank_may_state_a_job_of_its_own() -> None:
    async def scenario(service: Service) -> None:
        larger = {"vramcast/job": json.dumps({**MLP, "network": {**MLP["network"], "input_features": 4096}})}  # type: ignore[dict-item]
        last = {**WORKER, "metadata": {"annotations": larger}}
        jobs = [{"name": name, "template": {"spec": {"template": item}}} for name, item in (("a", WORKER), ("b", last))]
        thing = {"metadata": {"name": "stages", "annotations": JOB}, "spec": {"replicatedJobs": jobs}}
        asked = review("JobSet", thing)
        after = patched(asked, (await service.post("/k8s/mutate", asked)).json)
        first, second = (at(after, f"spec/replicatedJobs/{index}/template/spec/template") for index in (0, 1))
        needs = [int(item["metadata"]["annotations"]["vramcast/need-mib"]) for item in (first, second)]
        assert needs[1] > needs[0] > 0
        asked["request"]["object"]["spec"]["replicatedJobs"][1]["template"]["spec"]["template"] = 5
        assert (await service.post("/k8s/mutate", asked)).json["response"]["allowed"]

    run(scenario, "hami")
