"""How the addresses of the page for on-call are described; they stand in the table of gateway/openapi/endpoints.py."""

from dataclasses import replace

from gateway.dashboard_assets import ASSETS, CSS, ICON, SCRIPT, html_headers
from gateway.http.response import JSON
from gateway.http.sse import EVENTS
from gateway.http.static import HTML
from gateway.openapi.model import SERVICE, constant, inside
from gateway.openapi_door import Door, Parameter, Says, in_json, only
from gateway.operations.dashboard import Session
from gateway.operations.state import State
from scheduler.errors import ErrorCode

PAGE_HEADERS = ("x-request-id", *(name for name, _ in html_headers()))
SESSION = Says(
    sentence="The browser has it, or has it no more.",
    content=in_json(Session),
    headers=("x-request-id", "Cache-Control", "Set-Cookie"),
)
WATCHED = (
    "With `Accept: text/event-stream`: first an event `history` with the last quarter of an hour, then `state` every second, or "
    "sooner where a worker is lost. Without it: one document of state. A browser sends its cookie instead of the token."
)
ASSET = Parameter(name="id", place="path", sentence="Its name.", schema=only(*ASSETS))
_FILE = constant("/internal/dashboard/assets/{id}", "A file of the page", {SCRIPT: str})

DASHBOARD_DOORS: tuple[Door, ...] = (
    Door(
        path="/internal/dashboard",
        methods=("GET",),
        tag="operations",
        summary="The page for on-call",
        wants="service",
        answers={
            200: Says(sentence="The page.", content={HTML: str}, headers=PAGE_HEADERS),
            401: Says(sentence="The page where a browser logs in.", content={HTML: str}, headers=PAGE_HEADERS),
        },
        errors=SERVICE,
    ),
    Door(
        path="/internal/dashboard/session",
        methods=("POST", "DELETE"),
        tag="operations",
        summary="Log a browser in with the service token, and out",
        wants="service",
        answers={200: SESSION},
        errors=SERVICE,
    ),
    replace(
        inside("/internal/dashboard/events", "What the page shows, live", {200: ("The latest.", State)}),
        text=WATCHED,
        answers={
            200: Says(
                sentence="The latest, or the stream.",
                content={JSON: State, EVENTS: State},
                headers=("x-request-id", "Cache-Control"),
            )
        },
    ),
    replace(
        _FILE,
        tag="operations",
        parameters=(*_FILE.parameters, ASSET),
        answers={**_FILE.answers, 200: replace(_FILE.answers[200], content={SCRIPT: str, CSS: str, ICON: str})},
        errors=_FILE.errors | {ErrorCode.NOT_FOUND},
    ),
)
