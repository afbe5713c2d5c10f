"""The OpenAPI document of the admin API, made from its routes."""

from collections.abc import Iterable, Mapping
from typing import Any

from gateway.admin_api.authentication import REQUEST_HEADER
from gateway.admin_api.bodies import ProcessState
from gateway.admin_api.roles import least_role
from gateway.admin_api.route import PREFIX, AdminRoute
from gateway.admin_api.routes import ROUTES
from gateway.admin_api.sessions import ENDPOINTS as SESSION_ENDPOINTS
from gateway.http.response import JSON
from gateway.openapi.document import ApiInfo, openapi
from gateway.openapi.endpoint_kinds import ANY_PATH_ERRORS
from gateway.openapi.model import ApiEndpoint, Parameter, ResponseDescription
from gateway.openapi.schemas import NOT_EMPTY
from gateway.version import installed_version
from scheduler.errors import ErrorCode

INFO = ApiInfo(
    "Tierlane admin API",
    "Tiers, customers, keys, quotas, models and everything else that `tierlane` changes in the catalog. Every change can be "
    "tried with `?dry_run=true`, and has the rows before and after in its response. Every response has the id of its request "
    "in `x-request-id`. Bodies are strict: an unknown field gets a 400 that names it.",
    {
        "catalog": "Rows of the catalog.",
        "audit": "What was requested and changed.",
        "sessions": "For browsers: a session in a cookie.",
        "operations": "For load balancers.",
    },
    {
        "operator": {
            "type": "http",
            "scheme": "bearer",
            "description": "The token of an operator: `tlo_...`. A browser sends the cookie of its session instead, and with "
            f"changes `{REQUEST_HEADER}: 1`.",
        }
    },
    strict=True,
)
READ_ERRORS = ANY_PATH_ERRORS | {
    ErrorCode.INVALID_API_KEY,
    ErrorCode.RATE_LIMIT_EXCEEDED,
    ErrorCode.PERMISSION_DENIED,
    ErrorCode.CATALOG_UNAVAILABLE,
    ErrorCode.NOT_FOUND,
    ErrorCode.REQUEST_TOO_LARGE,
}
CHANGE_ERRORS = READ_ERRORS | {
    ErrorCode.CONFLICT,
    ErrorCode.CROSS_SITE,
    ErrorCode.PRECONDITION_FAILED,
    ErrorCode.UNSUPPORTED_MEDIA_TYPE,
}
DRY_RUN = Parameter(
    "dry_run",
    "query",
    "True: the change is checked and shown, but not made.",
    {"type": "boolean", "default": False},
)
IF_MATCH = Parameter("If-Match", "header", "The ETag of the row as it was read; another one gets 412.")
AUDIT = ("/usage", "/requests", "/config-changes")


def endpoint_of(route: AdminRoute) -> ApiEndpoint:
    """The description of a route."""
    parameters = [Parameter(name, "path", text, NOT_EMPTY) for name, text in route.parts.items()]
    parameters += [*route.query, *([DRY_RUN] if route.may_change else [])]
    parameters += [IF_MATCH] if route.may_change and route.method != "POST" else []
    headers = ("x-request-id", "Cache-Control")
    tagged = ("ETag",) if route.etag else ()
    success = ResponseDescription(
        description="Done." if route.may_change else "Found.",
        content={JSON: route.result},
        headers=headers,
        optional_headers=tagged,
    )
    responses = {route.status: success}
    if route.status != 200:  # Of a dry run.
        responses[200] = success
    return ApiEndpoint(
        path=route.path,
        methods=(route.method,),
        tag="audit" if route.path.removeprefix(PREFIX).startswith(AUDIT) else "catalog",
        summary=route.summary,
        responses=responses,
        errors=CHANGE_ERRORS if route.may_change else READ_ERRORS,
        token="operator",  # noqa: S106 - the kind of token
        body=route.body,
        body_required=route.body_required,
        example=route.example,
        parameters=tuple(parameters),
        description=role_text(route),
    )


def role_text(route: AdminRoute) -> str:
    """The least role that the route needs, in words."""
    role = f"Role: {least_role(route.action)}"
    if not route.fields:
        return f"{role}."
    return f"{role}; with only {', '.join(sorted(route.fields))}: {least_role(route.action_of_fields)}."


def _probe(path: str, summary: str) -> ApiEndpoint:
    ready = ResponseDescription(description="Ready.", content={JSON: ProcessState}, headers=("x-request-id",))
    errors = ANY_PATH_ERRORS | {ErrorCode.CATALOG_UNAVAILABLE}
    return ApiEndpoint(
        path=path, methods=("GET",), tag="operations", summary=summary, responses={200: ready}, errors=errors
    )


def document(routes: Iterable[AdminRoute]) -> dict[str, Any]:
    """The OpenAPI document of these routes."""
    probes = (_probe("/livez", "Whether the process runs"), _probe("/readyz", "Whether PostgreSQL responds"))
    return openapi([*map(endpoint_of, routes), *SESSION_ENDPOINTS, *probes], installed_version(), INFO)


DOCUMENTS: Mapping[str, Any] = {f"{PREFIX}/openapi.json": document(ROUTES)}
"""The documents that are served without a token, by path."""
