"""A page that is the same for everybody: bytes made once, an ETag, and headers that let a browser load nothing else."""

from base64 import b64encode
from hashlib import sha256
from importlib.resources import files

from multidict import CIMultiDictProxy

from gateway.http.response import Headers, HttpResponse
from gateway.http.router import RoutedRequest

HTML = "text/html; charset=utf-8"
CACHE_CONTROL = "public, max-age=300"
STYLE = files("gateway").joinpath("static", "page.css").read_text("utf-8")


def page_headers(content_type: str) -> Headers:
    """The headers of a page beside its ETag. The style stands in the page, so its hash is all that may apply."""
    headers = [("Cache-Control", CACHE_CONTROL), ("X-Content-Type-Options", "nosniff")]
    if content_type == HTML:
        style = b64encode(sha256(STYLE.encode()).digest()).decode()
        policy = f"default-src 'none'; style-src 'sha256-{style}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        headers += [("Content-Security-Policy", policy), ("Referrer-Policy", "no-referrer")]
    return headers


class StaticPage:
    """The handler."""

    def __init__(self, body: bytes, content_type: str) -> None:
        self.body = body
        self._content_type = content_type
        self._tag = f'"{sha256(body).hexdigest()[:16]}"'
        self._headers = [("ETag", self._tag), *page_headers(content_type)]

    async def __call__(self, call: RoutedRequest) -> HttpResponse:
        """The page, or 304 for a client that has it."""
        status = 304 if self._is_known(call.headers) else 200
        return HttpResponse(status, self.body, [("x-request-id", call.request_id), *self._headers], self._content_type)

    def _is_known(self, headers: CIMultiDictProxy[str]) -> bool:
        """Whether If-None-Match names it. A weak tag is as good, as RFC 9110 has it for this header."""
        named = ",".join(headers.getall("If-None-Match", ()))
        return any(each.strip().removeprefix("W/") in (self._tag, "*") for each in named.split(","))
