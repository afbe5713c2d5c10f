"""The description of the endpoints for operators: internal state, dashboard, actions, metrics."""

from collections.abc import Mapping
from typing import Any

from gateway.autoscale import Scale
from gateway.http.response import JSON
from gateway.http.sse import EVENTS
from gateway.http.static import ASSET_TYPES, HTML, SCRIPTED_PAGE_HEADERS
from gateway.metrics.exposition import METRICS_TYPE
from gateway.openapi.endpoint_kinds import ANY_PATH_ERRORS, operator_endpoint, probe_endpoint, static_page
from gateway.openapi.model import ApiEndpoint, Parameter
from gateway.openapi.schemas import NOT_EMPTY, only
from gateway.operations.action_bodies import (
    CordonBody,
    Cordoned,
    PurgeBody,
    Purged,
    RequeueBody,
    Requeued,
    UncordonBody,
)
from gateway.operations.dashboard.history_points import HistoryPoint
from gateway.operations.dashboard.page import ASSETS, DAYS, Session
from gateway.operations.dashboard.state import DashboardState
from gateway.operations.endpoints import RequestTimeline
from gateway.operations.health.pool_state import HealthNow
from gateway.operations.lookups import CustomerExplained, RequestExplained
from ledger.dead_letters import LetterGroups
from scheduler.errors import ErrorCode

OPERATIONS: tuple[ApiEndpoint, ...] = (
    operator_endpoint(
        "/internal/health",
        "Health of the system, with figures and reasons",
        {
            200: ("Healthy or degraded: requests are served.", HealthNow),
            503: ("Down: requests are not served.", HealthNow),
        },
    ),
    operator_endpoint(
        "/internal/requests/{id}",
        "History of one request",
        {200: ("Found.", RequestTimeline)},
        ErrorCode.NOT_FOUND,
        ErrorCode.CATALOG_UNAVAILABLE,
        parameters=(Parameter("id", "path", "The id of a request, from `x-request-id`.", NOT_EMPTY),),
    ),
    operator_endpoint(
        "/internal/autoscale", "Recommended number of workers of each pool, with reasons", {200: ("The advice.", Scale)}
    ),
)

DASHBOARD: tuple[ApiEndpoint, ...] = (
    operator_endpoint(
        "/internal/dashboard",
        "The dashboard",
        {200: ("The page.", {HTML: str}), 401: ("The login page.", {HTML: str})},
        headers=("x-request-id", *(name for name, _ in SCRIPTED_PAGE_HEADERS)),
    ),
    operator_endpoint(
        "/internal/dashboard/session",
        "Log a browser in with the service token, or out",
        {200: ("The session was created or deleted.", Session)},
        methods=("POST", "DELETE"),
        headers=("x-request-id", "Cache-Control", "Set-Cookie"),
    ),
    operator_endpoint(
        "/internal/dashboard/events",
        "The live state of the dashboard",
        {200: ("The current state, or the stream.", {JSON: DashboardState, EVENTS: DashboardState})},
        description=(
            "With `Accept: text/event-stream`: first the event `history` with the last 60 minutes, of one pool with "
            "`?pool=`, then `state` every second, or at once when a worker is lost. Otherwise one document. A browser sends its cookie instead of the "
            "token."
        ),
    ),
    operator_endpoint(
        "/internal/dashboard/history",
        "The history of the dashboard over days",
        {200: ("One point for each five minutes, the oldest first.", list[HistoryPoint])},
        ErrorCode.INVALID_REQUEST,
        parameters=(
            Parameter("days", "query", "The number of days until now, 7 by default.", only(*DAYS)),
            Parameter("pool", "query", "The pool; without it, the figures are those of all pools.", {"type": "string"}),
        ),
    ),
    operator_endpoint(
        "/internal/dashboard/customers/{id}",
        "An explanation of a customer: limits, GPU time, failed requests, rejections",
        {200: ("Found.", CustomerExplained)},
        ErrorCode.NOT_FOUND,
        ErrorCode.CATALOG_UNAVAILABLE,
        parameters=(Parameter("id", "path", "The name or id of a customer.", NOT_EMPTY),),
    ),
    operator_endpoint(
        "/internal/dashboard/requests/{id}",
        "An explanation of a request: its history, or the reason of its rejection",
        {200: ("Found.", RequestExplained)},
        ErrorCode.NOT_FOUND,
        ErrorCode.CATALOG_UNAVAILABLE,
        parameters=(Parameter("id", "path", "The id of a request, from `x-request-id`.", NOT_EMPTY),),
    ),
    static_page(
        "/internal/dashboard/assets/{id}",
        "A file of the dashboard",
        *ASSET_TYPES.values(),
        tag="operations",
        parameters=(Parameter("id", "path", "The name of the file.", only(*ASSETS)),),
        errors=ANY_PATH_ERRORS | {ErrorCode.NOT_FOUND},
    ),
    static_page(
        "/internal/runbooks/{id}",
        "A runbook that health links",
        HTML,
        tag="operations",
        parameters=(Parameter("id", "path", "The name of the runbook, as in `runbook` of a check.", NOT_EMPTY),),
        errors=ANY_PATH_ERRORS | {ErrorCode.NOT_FOUND},
    ),
)

WORKERS = "/internal/dashboard/workers"
LETTERS = "/internal/dashboard/dead-letters"
LETTER: Mapping[str, Any] = {"up_to": 41, "tier": "paid", "model": "tiny", "error_code": "worker_lost"}

METRICS_PAGE = probe_endpoint(
    "/metrics",
    "Metrics in the text format of Prometheus",
    {200: ("All metrics.", {METRICS_TYPE: str})},
    ("x-request-id", "Cache-Control"),
)


def _action(
    path: str, summary: str, body: type, result: tuple[str, Any], example: Mapping[str, Any], *errors: ErrorCode
) -> ApiEndpoint:
    """An action of the dashboard."""
    return operator_endpoint(
        path,
        summary,
        {200: result},
        ErrorCode.CROSS_SITE,
        ErrorCode.CATALOG_UNAVAILABLE,
        ErrorCode.REQUEST_TOO_LARGE,
        ErrorCode.UNSUPPORTED_MEDIA_TYPE,
        ErrorCode.UNSUPPORTED_ENCODING,
        *errors,
        methods=("POST",),
        body=body,
        example=example,
        description=(
            "The body contains what the operator confirmed; the action is rejected if that is no longer true. A browser "
            "sends its cookie, and `Sec-Fetch-Site` or `Origin` must show that the request comes from the dashboard. The "
            "action is recorded in `config_changes`."
        ),
    )


ACTIONS: tuple[ApiEndpoint, ...] = (
    _action(
        f"{WORKERS}/cordon",
        "Send no new work to a worker",
        CordonBody,
        ("The worker is cordoned.", Cordoned),
        {"worker": "worker-1", "healthy_left": 3, "reason": "its fan is loud"},
        ErrorCode.NOT_FOUND,
        ErrorCode.CHANGED_MEANWHILE,
    ),
    _action(
        f"{WORKERS}/uncordon",
        "Send new work to a worker again",
        UncordonBody,
        ("The worker is not cordoned.", Cordoned),
        {"worker": "worker-1"},
        ErrorCode.NOT_FOUND,
    ),
    operator_endpoint(
        LETTERS,
        "Count dead letters by tier, model and cause",
        {200: ("The counts.", LetterGroups)},
        ErrorCode.CATALOG_UNAVAILABLE,
    ),
    _action(
        f"{LETTERS}/requeue",
        "Run dead letters again: the oldest 32 of the confirmed ones",
        RequeueBody,
        ("The outcome of each.", Requeued),
        {"count": 2, "after": 0, **LETTER},
        ErrorCode.CHANGED_MEANWHILE,
    ),
    _action(
        f"{LETTERS}/purge",
        "Delete dead letters",
        PurgeBody,
        ("They were deleted.", Purged),
        {"count": 2, **LETTER},
        ErrorCode.CHANGED_MEANWHILE,
    ),
)
