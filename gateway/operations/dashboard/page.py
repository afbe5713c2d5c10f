"""The dashboard: its page, its files and its event stream.

A browser logs in with `POST /internal/dashboard/session` and the service token, and gets a cookie; programs send the token
with every request. The files are in gateway/static/dashboard. The page loads nothing from other hosts and has no inline
scripts. Charts are drawn by uPlot, which is included with its licence; without it, the page shows figures only.
"""

import asyncio
from importlib.resources import files
from typing import TypedDict

from gateway.http.response import HttpResponse
from gateway.http.router import RoutedRequest
from gateway.http.sse import EVENTS, EventStream
from gateway.http.static import HTML, SCRIPTED_PAGE_HEADERS, StaticPage, assets_of
from gateway.operations.dashboard.snapshots import DashboardSnapshots
from gateway.operations.session import LASTS_S, SessionAuth, set_cookie
from gateway.operations.uncached import uncached
from scheduler.errors import ErrorCode, RequestError

FILES = files("gateway").joinpath("static", "dashboard")
ASSETS = assets_of(FILES)
"""The files of the page -> media type."""

DAY_MS = 86_400_000
DAYS = tuple(map(str, range(1, 8)))


class Session(TypedDict):
    """Seconds until the session expires; 0: the browser must log in."""

    lasts_s: int


class Dashboard:
    """The handlers of the dashboard."""

    def __init__(self, session_auth: SessionAuth, snapshots: DashboardSnapshots) -> None:
        self._session_auth = session_auth
        self._snapshots = snapshots
        self._page, self._login = (FILES.joinpath(name).read_bytes() for name in ("page.html", "login.html"))
        self._assets = {name: StaticPage(FILES.joinpath(name).read_bytes(), kind) for name, kind in ASSETS.items()}

    async def page(self, call: RoutedRequest) -> HttpResponse:
        """The page. A browser without a session gets the login page; this is not a failed authentication."""
        is_browser = "Authorization" not in call.headers and "text/html" in call.headers.get("Accept", "")
        if is_browser and not self._session_auth.left_s(call):
            return self._html(call, 401, self._login)
        self._session_auth.check(call)
        return self._html(call, 200, self._page)

    async def log_in(self, call: RoutedRequest) -> HttpResponse:
        """Set the session cookie, for the service token. Failed attempts are throttled as in all authentication."""
        return self._session(call, self._session_auth.issue(call), LASTS_S)

    async def log_out(self, call: RoutedRequest) -> HttpResponse:
        """Delete the session cookie."""
        self._session_auth.check(call)
        return self._session(call, "", 0)

    async def events(self, call: RoutedRequest) -> HttpResponse:
        """The event stream if the client accepts one, else the latest state."""
        lasts_s = self._session_auth.check(call)
        latest = await self._snapshots.current()
        if EVENTS not in call.headers.get("Accept", ""):
            return uncached(call, latest.state)
        subscribers = self._snapshots.subscribers
        subscribers.check_limit()
        pool = call.request.query.get("pool", "")
        stream = EventStream(lambda stream: subscribers.serve(stream, self._snapshots.opening(pool), lasts_s))
        stream.headers.append(("x-request-id", call.request_id))
        return stream

    async def history(self, call: RoutedRequest) -> HttpResponse:
        """The history of some days, of one pool if named. Raises RequestError `invalid_request`."""
        self._session_auth.check(call)
        days, pool = call.request.query.get("days", "7"), call.request.query.get("pool", "")
        if days not in DAYS:
            raise RequestError(ErrorCode.INVALID_REQUEST, "days must be 1 to 7.", "days")
        latest, week = await self._snapshots.current(), self._snapshots.history.week
        # In a thread, because thousands of points are decoded.
        points = await asyncio.to_thread(week.since, latest.state.at_ms - int(days) * DAY_MS)
        return uncached(call, [point.of_pool(pool) for point in points])

    async def asset(self, call: RoutedRequest) -> HttpResponse:
        """A file of the page. Files contain no data and need no token. Raises RequestError `not_found`."""
        found = self._assets.get(call.tail)
        if found is None:
            raise RequestError(ErrorCode.NOT_FOUND)
        return await found(call)

    def _session(self, call: RoutedRequest, value: str, lasts_s: int) -> HttpResponse:
        cookie = set_cookie(value, lasts_s=lasts_s, secure=call.headers.get("X-Forwarded-Proto") == "https")
        headers = [("x-request-id", call.request_id), ("Cache-Control", "no-store"), ("Set-Cookie", cookie)]
        return HttpResponse.of(200, Session(lasts_s=lasts_s), headers)

    def _html(self, call: RoutedRequest, status: int, body: bytes) -> HttpResponse:
        return HttpResponse(status, body, [("x-request-id", call.request_id), *SCRIPTED_PAGE_HEADERS], HTML)
