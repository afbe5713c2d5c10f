"""The OpenAPI document describes exactly the routes, error codes and headers of a gateway."""

import re
from pathlib import Path
from typing import Any

import pytest
from openapi_spec_validator import validate

from api_description import Described
from configs import gateway_config
from gateway.admin_api.document import DOCUMENTS
from gateway.admin_api.roles import least_role
from gateway.admin_api.routes import ROUTES
from gateway.admin_api.sessions import ENDPOINTS as SESSION_ENDPOINTS
from gateway.app import Gateway
from gateway.openapi.document import OPTIONAL, openapi
from gateway.openapi.endpoint_kinds import ADMIN_ERRORS, NOT_INFERENCE_ERRORS
from gateway.openapi.endpoints import ENDPOINTS
from integration.gateway_fixtures import LiteralCatalog
from scheduler.errors import ErrorCode

ROOT = Path(__file__).resolve().parents[2]
OF_HTTP = {"Date", "Content-Type", "Content-Length", "Connection"}
"""Headers of HTTP itself, which a description does not repeat."""

PUBLIC = {"/health", "/livez", "/readyz", "/metrics", "/", "/docs", "/openapi.json"}
PUBLIC |= {
    "/assets/{id}",
    "/internal/dashboard/assets/{id}",
    "/internal/runbooks/{id}",
    "/v2",
    "/v2/health/live",
    "/v2/health/ready",
}
"""Addresses that need no token."""

READ = {
    "X-Forwarded-For",
    "x-forwarded-for",
    "X-Forwarded-Proto",
    "Transfer-Encoding",
    "Content-Encoding",
    "Idempotency-Key",
    "If-Match",
    "If-None-Match",
    "Sec-Fetch-Site",
}
"""Headers that the gateway reads."""

OF_BROWSERS = "Access-Control-"
"""The headers of CORS, which only browsers send and read; they are off by default."""


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """The description."""
    return openapi(ENDPOINTS, "1")


@pytest.fixture(scope="module")
def routes() -> dict[str, set[str]]:
    """Every path of a gateway with its methods."""
    config = gateway_config(gateway_id="g", redis_url="redis://127.0.0.1:1", service_token="s")
    return Gateway(config, LiteralCatalog())._routes.table()


def test_the_document_is_valid(document: dict[str, Any]) -> None:
    """OpenAPI 3.1, by its validator; the names of operations are unique."""
    validate(document)
    names = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]

    assert document["openapi"].startswith("3.1")
    assert len(names) == len(set(names)) > 15


def test_every_route_is_described(routes: dict[str, set[str]]) -> None:
    """Once, with its methods, and no other route. Every error code is that of some address, except `abandoned` of the audit."""
    methods = [(endpoint.path, method) for endpoint in ENDPOINTS for method in endpoint.methods]
    described = {path: {method for each, method in methods if each == path} for path, _ in methods}
    codes = frozenset[ErrorCode]().union(*(endpoint.errors for endpoint in ENDPOINTS))

    assert described == routes, "add an ApiEndpoint for each route in gateway/openapi/endpoints.py"
    assert len(set(methods)) == len(methods)
    assert {code.value for code in set(ErrorCode) - codes - ADMIN_ERRORS} == {"abandoned"}
    assert set(ErrorCode) >= NOT_INFERENCE_ERRORS


def test_the_headers_of_limits_depend_on_the_status(document: dict[str, Any]) -> None:
    """Required after the key was found, optional if the response may come before, else absent."""
    described = Described(document)
    presence = {}
    for status, reference in document["paths"]["/v1/inference"]["post"]["responses"].items():
        response = described.resolved(reference)
        required = "RateLimit" in described.required(response)
        presence[status] = "always" if required else "maybe" if "RateLimit" in response["headers"] else "never"

    assert {status for status, each in presence.items() if each == "never"} == {"401", "403", "405"}
    assert {status for status, each in presence.items() if each == "maybe"} == {"400", "408", "429", "500", "503"}
    assert len(presence) == 18


def test_every_header_that_is_written_is_a_component(document: dict[str, Any]) -> None:
    """Names of headers in the code of the gateway, found by their form, are declared."""
    declared = {name.removesuffix(OPTIONAL).lower() for name in document["components"]["headers"]}
    form = re.compile(r"""[("]((?:[A-Z][A-Za-z]+(?:-[A-Z][A-Za-z]+)+|x-[a-z-]+[a-z]|RateLimit|Allow|ETag))(?:", |: )""")
    written = {
        name
        for path in (ROOT / "gateway").rglob("*.py")
        if path.parent.name != "openapi"
        for name in form.findall(path.read_text("utf-8"))
    }

    assert len(written) > 10
    left = {name for name in written - OF_HTTP - READ if not name.startswith(OF_BROWSERS)}
    assert sorted(name for name in left if name.lower() not in declared) == []


def test_every_reference_resolves(document: dict[str, Any]) -> None:
    """And every header and response is referred to."""
    described = Described(document)
    named = set(re.findall(r"'(#/components/[^']+)'", str(document)))
    components = {
        f"#/components/{kind}/{name}" for kind in ("headers", "responses") for name in document["components"][kind]
    }

    assert [reference for reference in named if not described.resolved({"$ref": reference})] == []
    assert components - named == set()
    assert len(components) > 40


def test_each_address_has_its_kind_of_token(document: dict[str, Any]) -> None:
    """The service token for internal ones, a key for customers, none for pages and probes."""
    schemes = {
        path: [name for each in next(iter(methods.values()))["security"] for name in each]
        for path, methods in document["paths"].items()
    }

    assert {path for path, names in schemes.items() if names == ["service"]} == {
        path for path in schemes if path.startswith("/internal/") and path not in PUBLIC
    }
    assert {path for path, names in schemes.items() if not names} == PUBLIC


def test_the_admin_api_is_described_from_its_routes() -> None:
    """A valid document with each route, and its role; the page has each, too."""
    document = DOCUMENTS["/admin/v1/openapi.json"]
    validate(document)
    page = (ROOT / "docs" / "admin-api.md").read_text("utf-8")
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}

    others = {(endpoint.methods[0], endpoint.path) for endpoint in SESSION_ENDPOINTS}
    assert {(route.method, route.path) for route in ROUTES} | others | {
        ("GET", "/livez"),
        ("GET", "/readyz"),
    } == described
    assert [path for method, path in others if f"`{method} {path}`" not in page] == []
    assert [route for route in ROUTES if f"| `{route.method} {route.path}` | {route.summary} | " not in page] == []
    for route in ROUTES:
        operation = document["paths"][route.path][route.method.lower()]
        parts = set(re.findall(r"\{(\w+)\}", route.path))

        assert operation["security"] == [{"operator": []}]
        assert f"Role: {least_role(route.action)}" in operation["description"]
        assert {each["name"] for each in operation["parameters"] if each["in"] == "path"} == parts
