"""The overlay `tls` and the chart's `tls`: everything that dials Redis, PostgreSQL or an endpoint has the files that it is told of."""

import copy
import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
import yaml

from deploy_files import DEPLOY, documents, objects, text_of
from tierlane.settings.declaration import variable
from tierlane.settings.sections import SETTINGS

OVERLAY = DEPLOY / "k8s" / "overlays" / "tls"
TEMPLATES = DEPLOY / "helm" / "tierlane" / "templates"
MOUNTED = "/etc/tls"
FILES = {f"{MOUNTED}/{name}" for name in ("ca.crt", "tls.crt", "tls.key")}


def operations(patch: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a patch that stands in the kustomization, or in a file beside it."""
    found = json.loads(text_of(OVERLAY / patch["path"])) if "path" in patch else yaml.safe_load(patch["patch"])
    assert {each["op"] for each in found} == {"add"}
    return list(found)


def patched() -> Iterator[dict[str, Any]]:
    """Each object that the overlay changes, with all its changes; only lists are added to."""
    changes: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for patch in documents(OVERLAY / "kustomization.yaml")[0]["patches"]:
        changes.setdefault((patch["target"]["kind"], patch["target"]["name"]), []).extend(operations(patch))
    for path, found in objects():
        added = changes.get((found["kind"], found["metadata"]["name"]), [])
        if not added or path.parent.name not in ("base", "keda"):
            continue
        made = copy.deepcopy(found)
        for each in added:
            *way, last = each["path"].strip("/").split("/")
            place: Any = made
            for step in way:
                place = place[int(step) if step.isdigit() else step]
            assert last == "-"
            place.append(each["value"])
        yield made


CHANGED = list(patched())


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for found in CHANGED:
        if found["kind"] in ("Deployment", "Job"):
            yield found["metadata"]["name"], found["spec"]["template"]["spec"]


@pytest.mark.parametrize("found", CHANGED, ids=lambda found: f"{found['kind']}-{found['metadata']['name']}")
def test_kubernetes_takes_what_is_changed(found: dict[str, Any]) -> None:
    """By its own schemas, strictly; operators' objects are KEDA's."""
    if found["apiVersion"].startswith("keda.sh/"):
        parameters = {each["parameter"] for each in found["spec"]["secretTargetRef"]}
        assert parameters == {"username", "password", "tls", "ca", "cert", "key"}
        return
    for version in ("1.29", "1.33"):
        kubernetes_validate.validate(found, version, strict=True)


def test_every_role_has_the_files() -> None:
    """From one secret, readable for the group that a pod runs as, and for nobody else."""
    assert {name for name, _ in pods()} == {"gateway", "scheduler", "worker", "migrate"}
    for name, pod in pods():
        (secret,) = [volume["secret"] for volume in pod["volumes"] if volume["name"] == "tls"]
        (mount,) = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "tls"]
        assert secret == {"secretName": "tierlane-tls", "defaultMode": 0o440}, name
        assert mount == {"name": "tls", "mountPath": MOUNTED, "readOnly": True}, name
        assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"], name


def test_an_endpoint_is_shown_the_certificate() -> None:
    """By settings that workers read, in the overlay as in the chart; and the network lets them."""
    worker = dict(pods())["worker"]["containers"][0]
    told = {each["name"]: each.get("value") for each in worker["env"] if "ENDPOINT" in each["name"]}
    (policy,) = [found for found in CHANGED if found["kind"] == "NetworkPolicy"]

    assert set(told.values()) == FILES
    assert set(told) == {variable(name) for name in SETTINGS if name.startswith("endpoint") and name.endswith("_file")}
    assert policy["spec"]["egress"][-1]["ports"] == [{"protocol": "TCP", "port": 443}]
    chart = text_of(TEMPLATES / "worker.yaml")
    assert all(f"{{name: {name}, value: {value}}}" in chart for name, value in told.items())


def test_the_chart_gives_every_role_the_files() -> None:
    """In each template that runs a container of ours, at the place that the documentation names."""
    assert f"mountPath: {MOUNTED}," in text_of(TEMPLATES / "_names.tpl")
    for role in ("gateway", "scheduler", "worker", "migrate"):
        text = text_of(TEMPLATES / f"{role}.yaml")
        assert text.count('include "tierlane.tlsMount"') == text.count('include "tierlane.tlsVolume"') == 1, role
    page = text_of(DEPLOY.parent / "docs" / "deploy.md")
    assert [file for file in FILES if f"={file}" not in page] == []


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("name", ["dev", "prod", "tls"])
def test_kustomize_builds_the_overlay(name: str) -> None:
    """As `kubectl apply -k` would."""
    command = ["kubectl", "kustomize", str(DEPLOY / "k8s" / "overlays" / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    built = [found for found in yaml.safe_load_all(done.stdout) if found]
    mounts = [f["metadata"]["name"] for f in built if f"mountPath: {MOUNTED}\n" in yaml.safe_dump(f)]
    assert sorted(mounts) == (["gateway", "migrate", "scheduler", "worker"] if name == "tls" else [])
