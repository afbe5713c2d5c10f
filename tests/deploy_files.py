"""The files of deploy/: manifests as data, and the commands of their containers."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
MANIFESTS = sorted(
    path
    for folder in ("k8s", "redis")
    for path in (DEPLOY / folder).rglob("*.yaml")
    if path.name != "kustomization.yaml"
)
KUSTOMIZATIONS = sorted(DEPLOY.rglob("kustomization.yaml"))
COMPOSE = sorted(DEPLOY.glob("compose*.yaml"))
DOCKERFILES = sorted((DEPLOY / "docker").glob("Dockerfile.*[!e]"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))


@cache
def text_of(path: Path) -> str:
    return path.read_text("utf-8")


def documents(path: Path) -> list[dict[str, Any]]:
    """The YAML documents of a file."""
    return [document for document in yaml.safe_load_all(text_of(path)) if document]


def objects() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every Kubernetes object, with its file."""
    for path in MANIFESTS:
        for document in documents(path):
            yield path, document


def named(kind: str, name: str) -> dict[str, Any]:
    """One object of the base."""
    return next(
        o for p, o in objects() if p.parent.name == "base" and (o["kind"], o["metadata"]["name"]) == (kind, name)
    )


def pod_specs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and pod of every deployment and job."""
    for _, found in objects():
        if found["kind"] in {"Deployment", "Job"}:
            yield found["metadata"]["name"], found["spec"]["template"]["spec"]


def compose_services() -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and definition of every service of every compose file."""
    for path in COMPOSE:
        yield from documents(path)[0].get("services", {}).items()


def commands() -> Iterator[list[str]]:
    """The arguments of `tierlane` in containers and units, the verb first."""
    for _, pod in pod_specs():
        yield from (c["args"] for c in pod["containers"] if c["image"].startswith("tierlane-"))
    for _, service in compose_services():
        if str(service.get("image", "")).startswith("tierlane-") and "command" in service:
            yield service["command"]
    for path in UNITS:
        program, *arguments = unit(path)["ExecStart"][0].split()
        if Path(program).name == "tierlane":
            yield arguments


def unit(path: Path) -> dict[str, list[str]]:
    """The values of a systemd unit by name, of all sections."""
    found: dict[str, list[str]] = {}
    for line in text_of(path).splitlines():
        name, is_set, value = line.partition("=")
        if is_set and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found
