"""Our manifests, webhook and extender under a live API server and scheduler: `make kube KUBE_BIN=DIR`."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from benchmarks.clusters.kube_cluster import DEPLOY, DEVICE_CLASS, Cluster, reason_to_skip, running_cluster

pytestmark = pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip()))

NETWORK = {"arch": "pyramid", "input_features": 4096, "output_features": 10, "depth": 6}
JOB = {"vramcast/job": json.dumps({"family": "mlp", "network": NETWORK, "training": {"batch_size": 256}})}
LABEL = {"vramcast": "yes"}
NODES, WATCHED_SECONDS, MOST_CALLS = 150, 15, 20


@pytest.fixture(scope="module")
def started() -> Iterator[Cluster]:
    with running_cluster() as cluster:
        cluster.apply(cluster.webhooks())
        selector = {"cel": {"expression": 'device.driver == "gpu.example.com"'}}
        cluster.apply(
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "DeviceClass",
                "metadata": {"name": DEVICE_CLASS},
                "spec": {"selectors": [selector]},
            }
        )
        time.sleep(2)  # the API server reads its webhooks with a delay
        yield cluster


@pytest.fixture
def cluster(started: Cluster) -> Iterator[Cluster]:
    yield started
    started.clear()


def node(name: str, **annotations: str) -> dict[str, Any]:
    amounts = {"cpu": "64", "memory": "256Gi", "pods": "110"}
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "ready"}
    metadata = {"name": name, "annotations": annotations, "labels": {"kubernetes.io/hostname": name}}
    status = {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status}


def gpus(free_mib: int) -> str:
    return json.dumps([{"id": "0", "free_mib": free_mib, "total_mib": 40960, "device": "a100_40gb"}])


def slice_of(name: str, count: int) -> dict[str, Any]:
    policy = {"default": "40Gi", "validRange": {"min": "1Mi", "step": "1Mi", "max": "40Gi"}}
    memory = {"value": "40Gi", "requestPolicy": policy}
    devices = [
        {"name": f"gpu-{index}", "allowMultipleAllocations": True, "capacity": {"memory": memory}}
        for index in range(count)
    ]
    pool = {"name": name, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": "gpu.example.com", "nodeName": name, "pool": pool, "devices": devices}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": name}, "spec": spec}


def claim(name: str, annotations: dict[str, str]) -> dict[str, Any]:
    requests = [{"name": "gpu", "exactly": {"deviceClassName": DEVICE_CLASS}}]
    metadata = {"name": name, "labels": LABEL, "annotations": annotations}
    spec = {"devices": {"requests": requests}}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": metadata, "spec": spec}


def pod(name: str, metadata: dict[str, Any] | None = None, resources: Any = None, **spec: Any) -> dict[str, Any]:
    container = {"name": "train", "image": "example/train", "resources": resources or {}}
    whole = {"restartPolicy": "Never", "containers": [container], **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **(metadata or {})}, "spec": whole}


def becomes(read: Callable[[], Any], expected: Any, seconds: float = 30) -> Any:
    end, value = time.monotonic() + seconds, read()
    while value != expected and time.monotonic() < end:
        time.sleep(0.2)
        value = read()
    return value


def bound(cluster: Cluster) -> dict[str, str | None]:
    pods = json.loads(cluster.kubectl("get", "pods", "-o", "json"))["items"]
    return {item["metadata"]["name"]: item["spec"].get("nodeName") for item in pods}


def test_the_manifests_are_accepted(cluster: Cluster) -> None:
    cluster.kubectl("create", "namespace", "vramcast", check=False)
    for name in ("vramcast.yaml", "examples.yaml"):
        documents = yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8"))
        ours = [item for item in documents if not item["apiVersion"].startswith("cert-manager.io/")]
        text = "\n---\n".join(json.dumps(item) for item in ours)
        output = cluster.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", text=text)
        assert output.count("(server dry run)") == len(ours), output


def test_a_claim_gets_its_amount(cluster: Cluster) -> None:
    cluster.apply(claim("gpu", JOB))
    after = cluster.get("resourceclaim", "gpu")
    need_mib = after["metadata"]["annotations"]["vramcast/need-mib"]
    request = after["spec"]["devices"]["requests"][0]["exactly"]
    assert request["capacity"]["requests"]["memory"] == f"{need_mib}Mi"
    assert int(need_mib) > 100


def test_a_pod_that_asks_by_annotation_gets_a_template(cluster: Cluster) -> None:
    cluster.apply(pod("asks", {"labels": LABEL, "annotations": JOB}))
    after = cluster.get("pod", "asks")
    (reference,) = after["spec"]["resourceClaims"]
    template = cluster.get("resourceclaimtemplate", reference["resourceClaimTemplateName"])
    request = template["spec"]["spec"]["devices"]["requests"][0]["exactly"]
    assert request["deviceClassName"] == DEVICE_CLASS
    assert request["capacity"]["requests"]["memory"].endswith("Mi")
    assert after["spec"]["containers"][0]["resources"]["claims"] == [{"name": reference["name"]}]


def test_claims_share_two_gpus_and_the_fifth_waits(cluster: Cluster) -> None:
    cluster.apply(node("n1"), slice_of("n1", 2))
    for index in range(5):
        name = f"job-{index}"
        claims = [{"name": "gpu", "resourceClaimName": name}]
        resources = {"claims": [{"name": "gpu"}]}
        cluster.apply(claim(name, {"vramcast/need-mib": "18000"}), pod(name, None, resources, resourceClaims=claims))
    expected = 4

    def count() -> int:
        return sum(place == "n1" for place in bound(cluster).values())

    assert becomes(count, expected) == expected
    time.sleep(3)
    assert count() == expected, "the fifth has no room"


def needs(name: str, need_mib: int) -> dict[str, Any]:
    limits = {"limits": {"nvidia.com/gpumem": str(need_mib)}}
    return pod(name, {"annotations": {"vramcast/need-mib": str(need_mib)}}, limits)


def test_the_extender_leaves_out_nodes_without_room(cluster: Cluster) -> None:
    cluster.apply(*(node(name, **{"vramcast/gpus": gpus(free)}) for name, free in (("small", 5000), ("large", 35000))))
    cluster.apply(needs("train", 30000))
    assert becomes(lambda: bound(cluster)["train"], "large") == "large"
    cluster.apply(needs("second", 30000))
    time.sleep(3)
    assert bound(cluster)["second"] is None, "the room is booked, though the node states it as free"


def test_a_pod_that_fits_nowhere_is_not_filtered_again_and_again(cluster: Cluster) -> None:
    cluster.apply(*(node(f"n{index}", **{"vramcast/gpus": gpus(1000 + index)}) for index in range(NODES)))
    before = cluster.filter_calls()
    cluster.apply(needs("large", 30000))
    time.sleep(WATCHED_SECONDS)
    calls = cluster.filter_calls() - before
    print(f"{calls} calls of /k8s/filter in {WATCHED_SECONDS} s")
    assert 0 < calls < MOST_CALLS
    assert bound(cluster)["large"] is None


def test_a_dead_service_admits_pods_unchanged(cluster: Cluster) -> None:
    """Kill the service; nothing starts it again, so this is the last test."""
    cluster.process.kill()
    cluster.process.wait(30)
    start = time.monotonic()
    cluster.apply(pod("alone", {"labels": LABEL, "annotations": JOB}))
    assert time.monotonic() - start < 10
    assert "resourceClaims" not in cluster.get("pod", "alone")["spec"]
