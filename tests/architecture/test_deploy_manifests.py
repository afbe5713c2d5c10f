"""Manifests match the schemas of Kubernetes and of compose, and name existing objects and files."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml

from deploy_files import COMPOSE, DEPLOY, DOCKERFILES, KUSTOMIZATIONS, documents, named, objects, text_of
from gateway.autoscale import PoolScale, scale_document
from gateway.openapi.endpoints import ENDPOINTS

VERSIONS = ("1.29", "1.33")
CHART = DEPLOY / "helm" / "tierlane" / "templates" / "scaled-object.yaml"
ADVICE: PoolScale = {
    "current_workers": 1,
    "recommended_workers": 7,
    "min_workers": 1,
    "max_workers": 9,
    "reason": "",
    "last_step": None,
    "inputs": None,
}
OF_OPERATORS = {"ScaledObject", "TriggerAuthentication", "PrometheusRule", "ServiceMonitor"}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "found",
    [found for _, found in objects() if found["kind"] not in OF_OPERATORS],
    ids=lambda found: f"{found['kind']}-{found['metadata']['name']}",
)
def test_kubernetes_accepts_the_object(found: dict[str, Any], version: str) -> None:
    """Strictly: an unknown field is an error."""
    kubernetes_validate.validate(found, version, strict=True)


def test_keda_scales_by_the_advice_of_the_gateways() -> None:
    """By the maximum of the gateways' metric, with a secret that exists; the chart by the endpoint of a gateway, with its token."""
    scaled, login = documents(DEPLOY / "k8s" / "keda" / "scaled-object.yaml")
    (trigger,) = scaled["spec"]["triggers"]
    text = re.sub(r"\{\{-.*?\}\}", "", text_of(CHART))
    charted, its_login = yaml.safe_load_all(re.sub(r"\{\{.*?\}\}", "x", text))
    (called,), (secret,) = charted["spec"]["triggers"], its_login["spec"]["secretTargetRef"]
    url = urlsplit(called["metadata"]["url"])
    value: Any = scale_document({"default": ADVICE})
    for name in called["metadata"]["valueLocation"].split("."):
        value = value[name]

    assert named("Deployment", scaled["spec"]["scaleTargetRef"]["name"])
    assert trigger["authenticationRef"]["name"] == login["metadata"]["name"]
    assert trigger["metadata"]["query"] == 'max(tierlane_recommended_workers{pool="default"})'
    assert trigger["metadata"]["threshold"] == called["metadata"]["targetValue"] == "1"
    assert value == 7
    assert url.path in {endpoint.path for endpoint in ENDPOINTS}
    assert [(url.port or 80)] == [port["port"] for port in named("Service", "gateway")["spec"]["ports"]]
    assert (called["metadata"]["authMode"], secret["parameter"], secret["key"]) == ("bearer", "token", "service-token")


@pytest.mark.parametrize("path", KUSTOMIZATIONS, ids=lambda p: str(p.parent.relative_to(DEPLOY)))
def test_kustomizations_name_existing_files_and_objects(path: Path) -> None:
    """And every file of the folder is named."""
    document = documents(path)[0]
    files = [file for made in document.get("configMapGenerator", []) for file in made["files"]]
    targets = {(found["kind"], found["metadata"]["name"]) for _, found in objects()}
    here = {file.name for file in path.parent.glob("*.yaml")} - {path.name}

    assert [name for name in (*document["resources"], *files) if not (path.parent / name).exists()] == []
    assert here <= set(document["resources"])
    for patch in document.get("patches", []):
        assert (patch["target"]["kind"], patch["target"]["name"]) in targets
        assert "patch" in patch or (path.parent / patch["path"]).exists()
    for count in document.get("replicas", []):
        assert named("Deployment", count["name"])


@pytest.mark.parametrize("path", COMPOSE, ids=lambda p: p.name)
def test_compose_files_match_the_schema(path: Path) -> None:
    """That of the compose specification."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_hadolint_has_no_warnings(path: Path) -> None:
    """Except that pip should pin versions, which the locks do."""
    command = [str(Path(sys.executable).with_name("hadolint")), "--ignore", "DL3013", "--format", "json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert json.loads(done.stdout) == []
