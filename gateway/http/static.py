"""A page that is the same for all clients: bytes built once, an ETag, and headers that forbid loading anything else."""

from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable

from gateway.http.response import Headers, HttpResponse
from gateway.http.router import RoutedRequest

HTML = "text/html; charset=utf-8"
CACHE_CONTROL = "public, max-age=300"
ASSET_TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""The media types of a page's files, by the end of the name."""

SCRIPTED_PAGE_HEADERS: Headers = [
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    (
        "Content-Security-Policy",
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'",
    ),
    ("Referrer-Policy", "no-referrer"),
]
"""The headers of a page with scripts: those of its own host only."""

STYLE = files("gateway").joinpath("static", "page.css").read_text("utf-8")

SHARED = ("charts.js", "daily.js", "dashboard.css", "dialog.js", "format.js", "icon.svg", "uplot.css", "uplot.js")
"""The files of the dashboard that the pages of customers and admins load, too."""


def assets_of(folder: Traversable) -> dict[str, str]:
    """The files in a folder that pages load -> media type."""
    names = sorted(path.name for path in folder.iterdir())
    return {name: kind for name in names for end, kind in ASSET_TYPES.items() if name.endswith(end)}


def page_headers(content_type: str, policy: str = "") -> Headers:
    """The headers of a page except its ETag. Without a `policy` only the inline style is allowed, by its hash."""
    headers = [("Cache-Control", CACHE_CONTROL), ("X-Content-Type-Options", "nosniff")]
    if content_type == HTML:
        style = b64encode(sha256(STYLE.encode()).digest()).decode()
        policy = policy or (
            f"default-src 'none'; style-src 'sha256-{style}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        headers += [("Content-Security-Policy", policy), ("Referrer-Policy", "no-referrer")]
    return headers


class StaticPage:
    """The handler of one page."""

    def __init__(self, body: bytes, content_type: str, policy: str = "") -> None:
        self.body = body
        self._content_type = content_type
        self._tag = f'"{sha256(body).hexdigest()[:16]}"'
        self._headers = [("ETag", self._tag), *page_headers(content_type, policy)]

    async def __call__(self, request: RoutedRequest) -> HttpResponse:
        """Return the page, or 304 if the client has this version."""
        named = ",".join(request.headers.getall("If-None-Match", ()))
        # Weak tags match too (RFC 9110).
        is_current = any(each.strip().removeprefix("W/") in (self._tag, "*") for each in named.split(","))
        status = 304 if is_current else 200
        return HttpResponse(
            status, self.body, [("x-request-id", request.request_id), *self._headers], self._content_type
        )
