"""The manifests against their schemas and against the service."""

import json
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from served import Scripted

from vramcast.collocation.adapters.job_text import job_of_text
from vramcast.collocation.service.app import make_app
from vramcast.collocation.service.settings import Settings
from vramcast.commands.collocation.serve_command import _parser

DEPLOY = Path(__file__).parents[1] / "deploy" / "kubernetes"
SCHEMA = Path(__file__).parent / "fixtures" / "kubernetes" / "scheduler_configuration.schema.json"
DOCUMENTS = [
    pytest.param(document, id=f"{path.stem}-{document['kind']}")
    for path in sorted(DEPLOY.glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
]
_OWN_SCHEMA = {"KubeSchedulerConfiguration"}
_FOREIGN = {"Issuer", "Certificate"}
"""Kinds of cert-manager, whose schemas no package contains."""


def one(kind: str) -> Any:
    return next(item.values[0] for item in DOCUMENTS if item.values[0]["kind"] == kind)  # type: ignore[index]


@pytest.mark.parametrize("version", ["1.29", "1.33"])
@pytest.mark.parametrize("document", DOCUMENTS)
def test_manifests_follow_the_schemas_of_kubernetes(document: Any, version: str) -> None:
    if document["kind"] in _OWN_SCHEMA:
        jsonschema.validate(document, json.loads(SCHEMA.read_text(encoding="utf-8")))
    elif document["kind"] in _FOREIGN:
        assert document["apiVersion"] == "cert-manager.io/v1"
        assert document["spec"]
    else:
        kubernetes_validate.validate(document, version, strict=True)


def test_the_paths_in_the_manifests_exist() -> None:
    paths = make_app(Settings(), Scripted).paths
    extender = one("KubeSchedulerConfiguration")["extenders"][0]
    prefix = extender["urlPrefix"].partition(":443")[2]
    assert {f"{prefix}/{extender[verb]}" for verb in ("filterVerb", "prioritizeVerb")} <= paths
    assert one("MutatingWebhookConfiguration")["webhooks"][0]["clientConfig"]["service"]["path"] in paths
    container = one("Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert {container[probe]["httpGet"]["path"] for probe in ("readinessProbe", "livenessProbe")} <= paths


def test_the_arguments_of_the_container_are_valid() -> None:
    container = one("Deployment")["spec"]["template"]["spec"]["containers"][0]
    command, *words = container["args"]
    assert command == "serve"
    found = _parser().parse_args(words)
    assert found.port == container["ports"][0]["containerPort"], shlex.join(words)


def test_the_job_of_the_example_is_valid() -> None:
    notes = one("Pod")["metadata"]["annotations"]
    assert job_of_text(notes["vramcast/job"])["spec"]["family"] == "mlp"
