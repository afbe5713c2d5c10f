"""The API's description is whole: every route, every error code, every header, and nothing that is not there."""

import re
from pathlib import Path
from typing import Any

import pytest
from openapi_spec_validator import validate

from api_description import Described
from gateway.app import Gateway
from gateway.config import GatewayConfig
from gateway.openapi.document import openapi
from gateway.openapi.endpoints import ENDPOINTS
from gateway.openapi.model import NOT_INFERENCE, OPTIONAL
from integration.gateway_fixtures import LiteralCatalog
from scheduler.errors import ErrorCode

ROOT = Path(__file__).resolve().parents[2]
UNSAID = {"Date", "Content-Type", "Content-Length", "Connection"}
"""Headers of HTTP itself, which a description does not repeat."""

SAY_NOTHING = {"/livez", "/readyz", "/metrics", "/", "/docs", "/openapi.json", "/internal/dashboard/assets/{id}"}
"""Addresses that need no token."""

ASKED = {
    "X-Forwarded-Proto",
    "Transfer-Encoding",
    "Content-Encoding",
    "Idempotency-Key",
    "If-None-Match",
    "Sec-Fetch-Site",
}
"""Headers that the gateway reads."""

OF_BROWSERS = "Access-Control-"
"""The headers of CORS, which browsers alone send and read: no caller has to know them, and they are off by default."""


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """The description."""
    return openapi(ENDPOINTS, "1")


@pytest.fixture(scope="module")
def routes() -> dict[str, set[str]]:
    """Every path of a gateway with its methods."""
    config = GatewayConfig(gateway_id="g", redis_url="redis://127.0.0.1:1", service_token="s")
    return Gateway(config, LiteralCatalog())._routes.table()


def test_it_is_valid(document: dict[str, Any]) -> None:
    """OpenAPI 3.1, by its validator; operations have names of their own."""
    validate(document)
    names = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]

    assert document["openapi"].startswith("3.1")
    assert len(names) == len(set(names)) > 15


def test_every_route_is_described(routes: dict[str, set[str]]) -> None:
    """A route without a door, or with other methods than its door has, is named with what to do."""
    endpoints = {door.path: set(door.methods) for door in ENDPOINTS}
    bare = [
        f"{', '.join(sorted(methods))} {path} is not described: add an ApiEndpoint for it in gateway/openapi/endpoints.py"
        for path, methods in routes.items()
        if endpoints.get(path) != methods
    ]

    assert bare == []


def test_no_description_is_of_a_route_that_is_not_there(routes: dict[str, set[str]]) -> None:
    """A door without a route is named."""
    gone = [f"{door.path} is described, but no gateway answers it" for door in ENDPOINTS if door.path not in routes]

    assert gone == []
    assert len({door.path for door in ENDPOINTS}) == len(ENDPOINTS)


def test_every_error_code_has_a_door() -> None:
    """Each code is among the errors of some address, but for those of which it is said why not."""
    told = frozenset[ErrorCode]().union(*(door.errors for door in ENDPOINTS))

    assert {code.value for code in set(ErrorCode) - told} == {"abandoned"}
    assert set(ErrorCode) >= NOT_INFERENCE


def test_the_limits_are_promised_wherever_it_is_known_whose_they_are(document: dict[str, Any]) -> None:
    """Of one address: required with what comes after the key was found, named with what may come before, else absent."""
    described = Described(document)
    told = {}
    for status, reference in document["paths"]["/v1/inference"]["post"]["responses"].items():
        response = described.resolved(reference)
        required = "RateLimit" in described.required(response)
        told[status] = "always" if required else "maybe" if "RateLimit" in response["headers"] else "never"

    assert {status for status, said in told.items() if said == "never"} == {"401", "403", "405"}
    assert {status for status, said in told.items() if said == "maybe"} == {"400", "408", "429", "500", "503"}
    assert {status for status, said in told.items() if said == "always"} == {
        "200", "202", "404", "409", "413", "415", "422", "499", "502", "504",
    }  # fmt: skip


def test_every_header_that_is_written_is_a_component(document: dict[str, Any]) -> None:
    """Names of headers in the gateway's code, found by their form, are all declared."""
    declared = {name.removesuffix(OPTIONAL).lower() for name in document["components"]["headers"]}
    form = re.compile(r"""[("]((?:[A-Z][A-Za-z]+(?:-[A-Z][A-Za-z]+)+|x-[a-z-]+[a-z]|RateLimit|Allow|ETag))(?:", |: )""")
    written = {
        name
        for path in (ROOT / "gateway").rglob("*.py")
        if path.parent.name != "openapi"
        for name in form.findall(path.read_text("utf-8"))
    }

    assert len(written) > 10
    left = {name for name in written - UNSAID - ASKED if not name.startswith(OF_BROWSERS)}
    assert sorted(name for name in left if name.lower() not in declared) == []


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    """And every header and response is referred to; a schema may be one of a field that is only taken empty yet."""
    described = Described(document)
    named = set(re.findall(r"'(#/components/[^']+)'", str(document)))
    components = {
        f"#/components/{kind}/{name}" for kind in ("headers", "responses") for name in document["components"][kind]
    }

    assert [reference for reference in named if not described.resolved({"$ref": reference})] == []
    assert components - named == set()
    assert len(components) > 40


def test_tokens_are_asked_for_where_they_are_checked(document: dict[str, Any]) -> None:
    """The service token inside, a key for customers, none for pages and probes."""
    asked = {
        path: [name for each in next(iter(methods.values()))["security"] for name in each]
        for path, methods in document["paths"].items()
    }

    assert {path for path, names in asked.items() if names == ["service"]} == {
        path for path in asked if path.startswith("/internal/") and path not in SAY_NOTHING
    }
    assert {path for path, names in asked.items() if not names} == SAY_NOTHING
