"""The manifests are what their readers take: Kubernetes' schemas, those of compose, small ones of ours for operators."""

import copy
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
from jsonschema import Draft202012Validator

from deploy_files import COMPOSE, DEPLOY, DOCKERFILES, KUSTOMIZATIONS, documents, named, objects, text_of
from gateway.autoscale import PoolScale, scale_document
from gateway.openapi.endpoints import ENDPOINTS

VERSIONS = ("1.29", "1.33")
OBJECTS = [
    (path, found)
    for path, found in objects()
    if "." not in found["apiVersion"].split("/")[0] or "k8s.io" in found["apiVersion"]
]
OURS = {"metadata": {"type": "object", "required": ["name"]}, "apiVersion": {}, "kind": {}}


def closed(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties, "required": required}


TEXT, NUMBER, MAP = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "object"}
REFERENCE = closed({"name": TEXT}, ["name"])
SCALED = closed(
    {
        "scaleTargetRef": REFERENCE,
        **dict.fromkeys(("minReplicaCount", "maxReplicaCount", "pollingInterval", "cooldownPeriod"), NUMBER),
        "fallback": closed({"failureThreshold": NUMBER, "replicas": NUMBER, "behavior": TEXT}, ["replicas"]),
        "advanced": closed(
            {
                "scalingModifiers": closed(
                    {"formula": TEXT, "target": TEXT, "metricType": TEXT}, ["formula", "target"]
                ),
                "horizontalPodAutoscalerConfig": closed({"behavior": MAP}, ["behavior"]),
            },
            [],
        ),
        "triggers": {
            "type": "array",
            "minItems": 1,
            "items": closed(
                {
                    "type": {"enum": ["metrics-api", "prometheus", "redis"]},
                    "name": TEXT,
                    "metadata": MAP,
                    "authenticationRef": REFERENCE,
                },
                ["type", "name", "metadata"],
            ),
        },
    },
    ["scaleTargetRef", "triggers"],
)
RULE = {
    "oneOf": [
        closed({"record": TEXT, "expr": TEXT, "labels": MAP}, ["record", "expr"]),
        closed(
            {"alert": TEXT, "expr": TEXT, "for": TEXT, "labels": MAP, "annotations": MAP},
            ["alert", "expr", "for", "labels", "annotations"],
        ),
    ]
}
RULES = closed(
    {
        "groups": {
            "type": "array",
            "items": closed({"name": TEXT, "rules": {"type": "array", "items": RULE}}, ["name", "rules"]),
        }
    },
    ["groups"],
)
SPECS = {
    "ScaledObject": SCALED,
    "TriggerAuthentication": closed({"secretTargetRef": {"type": "array", "items": MAP}}, ["secretTargetRef"]),
    "PrometheusRule": RULES,
    "ServiceMonitor": closed(
        {"selector": MAP, "endpoints": {"type": "array", "items": MAP}}, ["selector", "endpoints"]
    ),
}
"""The specs of operators' objects, as far as they are used here: an unknown field is an error."""

CUSTOM = [(path, found) for path, found in objects() if found["kind"] in SPECS]


def ids(value: object) -> str:
    return (
        value["kind"] + "-" + value["metadata"]["name"]
        if isinstance(value, dict)
        else str(getattr(value, "name", value))
    )


def faults(found: dict[str, Any], version: str) -> list[str]:
    """What Kubernetes of this version would refuse."""
    try:
        kubernetes_validate.validate(found, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [error.message]
    return []


def test_each_object_is_looked_at() -> None:
    """None falls between Kubernetes' own schemas and ours."""
    assert len(OBJECTS) + len(CUSTOM) == len(list(objects()))
    assert len(OBJECTS) > 15


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("path", "found"), OBJECTS, ids=ids)
def test_kubernetes_takes_it(path: Path, found: dict[str, Any], version: str) -> None:
    """Strictly: an unknown field is an error."""
    assert faults(found, version) == []


def test_a_mistake_in_a_manifest_is_found() -> None:
    """What the tests above rest on: a misspelt field and a wrong type are errors."""
    wrong = copy.deepcopy(named("Deployment", "gateway"))
    container = wrong["spec"]["template"]["spec"]["containers"][0]
    container["livenessProb"] = container.pop("livenessProbe")
    assert faults(wrong, VERSIONS[-1])

    wrong = copy.deepcopy(named("Deployment", "gateway"))
    wrong["spec"]["replicas"] = "two"
    assert faults(wrong, VERSIONS[-1])


@pytest.mark.parametrize(("path", "found"), CUSTOM, ids=ids)
def test_operators_take_it(path: Path, found: dict[str, Any]) -> None:
    """Objects of KEDA and of Prometheus' operator have the fields that these know."""
    schema = closed(OURS | {"spec": SPECS[found["kind"]]}, ["apiVersion", "kind", "metadata", "spec"])

    assert [error.message for error in Draft202012Validator(schema).iter_errors(found)] == []


def test_what_is_scaled_is_there() -> None:
    """KEDA's target, its secrets and its formula name what exists."""
    scaled, *logins = documents(DEPLOY / "k8s" / "keda" / "scaled-object.yaml")
    triggers = scaled["spec"]["triggers"]
    formula = scaled["spec"]["advanced"]["scalingModifiers"]["formula"]

    assert named("Deployment", scaled["spec"]["scaleTargetRef"]["name"])
    assert {t["authenticationRef"]["name"] for t in triggers} == {login["metadata"]["name"] for login in logins}
    assert all(trigger["name"] in formula for trigger in triggers)


def test_scalers_ask_the_gateways_for_their_advice() -> None:
    """An address that gateways answer at the port of their service, a number in what they say, and the service token."""
    scaled, *logins = documents(DEPLOY / "k8s" / "keda" / "scaled-object.yaml")
    chart = text_of(DEPLOY / "helm" / "tierlane" / "templates" / "scaled-object.yaml")
    trigger = next(t for t in scaled["spec"]["triggers"] if t["type"] == "metrics-api")
    login = next(each for each in logins if each["metadata"]["name"] == trigger["authenticationRef"]["name"])
    (secret,) = login["spec"]["secretTargetRef"]
    url = urlsplit(trigger["metadata"]["url"])
    found: Any = scale_document({"default": advice(7)})
    for name in trigger["metadata"]["valueLocation"].split("."):
        found = found[name]

    assert found == 7
    assert url.path in {door.path for door in ENDPOINTS}
    assert (url.hostname or "").split(".")[0] == "gateway"
    assert [(url.port or 80)] == [port["port"] for port in named("Service", "gateway")["spec"]["ports"]]
    assert (trigger["metadata"]["authMode"], secret["parameter"], secret["key"]) == ("bearer", "token", "service-token")
    for name in ("valueLocation", "authMode", "targetValue"):
        assert f"{name}: {trigger['metadata'][name]}" in chart.replace('"', "")
    assert url.path in chart


def test_operators_take_the_charts_scaler() -> None:
    """As far as a chart can be read without Helm: every value is a 1, every condition holds."""
    chart = text_of(DEPLOY / "helm" / "tierlane" / "templates" / "scaled-object.yaml")
    rendered = re.sub(r"{{ [^}]* }}", "1", re.sub(r"{{-[^}]*}}\n", "", chart))
    found = list(yaml.safe_load_all(rendered))

    assert [each["kind"] for each in found] == ["ScaledObject", "TriggerAuthentication"]
    for each in found:
        schema = closed(OURS | {"spec": SPECS[each["kind"]]}, ["apiVersion", "kind", "metadata", "spec"])
        assert [error.message for error in Draft202012Validator(schema).iter_errors(each)] == []


def advice(workers: int) -> PoolScale:
    return {
        "current_workers": 1,
        "recommended_workers": workers,
        "min_workers": 1,
        "max_workers": 9,
        "reason": "",
        "last_step": None,
        "inputs": None,
    }


@pytest.mark.parametrize("path", KUSTOMIZATIONS, ids=lambda p: str(p.parent.relative_to(DEPLOY)))
def test_kustomizations_name_what_is_there(path: Path) -> None:
    """Every resource and file exists; every file of the folder is named; every patch and count has its target."""
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


def compose_faults(path: Path) -> str:
    """What the schema of compose files refuses, or nothing."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode else ""


@pytest.mark.parametrize("path", COMPOSE, ids=lambda p: p.name)
def test_compose_takes_it(path: Path) -> None:
    """By the schema of the specification."""
    assert compose_faults(path) == ""


def test_a_mistake_in_a_compose_file_is_found(tmp_path: Path) -> None:
    """What the test above rests on."""
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(text_of(DEPLOY / "compose.yaml").replace("    image: postgres:18-bookworm", "    imag: postgres"))

    assert "imag" in compose_faults(wrong)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_hadolint_is_content(path: Path) -> None:
    """No warning but that pip pins versions, which the locks do."""
    command = [str(Path(sys.executable).with_name("hadolint")), "--ignore", "DL3013", "--format", "json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert json.loads(done.stdout) == []
