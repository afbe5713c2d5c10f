"""The page `/`: an introduction, and for who signs in with an API key the limits, usage, jobs and keys, and a request to try.

The files are in gateway/static/account; those that it shares with the dashboard are in gateway/static/dashboard. They have no
data: the page sends the key with each request to the API, as every client.
"""

from importlib.resources import files

from gateway.http.response import HttpResponse
from gateway.http.router import RoutedRequest
from gateway.http.static import HTML, SHARED, StaticPage, assets_of
from scheduler.errors import ErrorCode, RequestError

STATIC = files("gateway").joinpath("static")
OWN, DASHBOARD = STATIC.joinpath("account"), STATIC.joinpath("dashboard")
ASSETS = assets_of(OWN) | {name: assets_of(DASHBOARD)[name] for name in SHARED}
"""The files of the page -> media type."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


class AccountPage:
    """The handlers of the page and of its files."""

    def __init__(self) -> None:
        self.page = StaticPage(STATIC.joinpath("landing.html").read_bytes(), HTML, POLICY)
        self._assets = {
            name: StaticPage((DASHBOARD if name in SHARED else OWN).joinpath(name).read_bytes(), kind)
            for name, kind in ASSETS.items()
        }

    async def asset(self, call: RoutedRequest) -> HttpResponse:
        """A file of the page. Raises RequestError `not_found`."""
        found = self._assets.get(call.tail)
        if found is None:
            raise RequestError(ErrorCode.NOT_FOUND)
        return await found(call)
