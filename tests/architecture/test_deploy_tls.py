"""TLS in the overlay `tls` and in the chart: every role has the files of certificates."""

import copy
import json
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
    """Of a patch in the kustomization or in a file beside it."""
    found = json.loads(text_of(OVERLAY / patch["path"])) if "path" in patch else yaml.safe_load(patch["patch"])
    assert {each["op"] for each in found} == {"add"}
    return list(found)


def patched() -> Iterator[dict[str, Any]]:
    """Each object that the overlay changes, with its changes, all of which add to lists."""
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
def test_kubernetes_accepts_the_changed_object(found: dict[str, Any]) -> None:
    """Strictly."""
    for version in ("1.29", "1.33"):
        kubernetes_validate.validate(found, version, strict=True)


def test_every_role_has_the_files() -> None:
    """From one secret, readable only for the group of the pod; in the overlay and in the chart."""
    assert {name for name, _ in pods()} == {"gateway", "scheduler", "worker", "migrate"}
    assert f"mountPath: {MOUNTED}," in text_of(TEMPLATES / "_names.tpl")
    for name, pod in pods():
        (secret,) = [volume["secret"] for volume in pod["volumes"] if volume["name"] == "tls"]
        (mount,) = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "tls"]
        text = text_of(TEMPLATES / f"{name}.yaml")
        assert secret == {"secretName": "tierlane-tls", "defaultMode": 0o440}, name
        assert mount == {"name": "tls", "mountPath": MOUNTED, "readOnly": True}, name
        assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"], name
        assert text.count('include "tierlane.tlsMount"') == text.count('include "tierlane.tlsVolume"') == 1, name


def test_a_worker_has_the_files_for_its_endpoint() -> None:
    """In settings of the worker, in the overlay and in the chart; the network policy allows the port."""
    worker = dict(pods())["worker"]["containers"][0]
    env = {each["name"]: each.get("value") for each in worker["env"] if "ENDPOINT" in each["name"]}
    (policy,) = [found for found in CHANGED if found["kind"] == "NetworkPolicy"]

    assert set(env.values()) == FILES
    assert set(env) == {variable(name) for name in SETTINGS if name.startswith("endpoint") and name.endswith("_file")}
    assert policy["spec"]["egress"][-1]["ports"] == [{"protocol": "TCP", "port": 443}]
    assert all(f"{{name: {name}, value: {value}}}" in text_of(TEMPLATES / "worker.yaml") for name, value in env.items())
