"""Whether an action comes from our own page. Pure.

The cookie is `SameSite=Strict`, and JSON cannot be sent across origins without asking; this is the third lock, and the
only one against other programs on the same host name. Browsers say where a request comes from in `Sec-Fetch-Site`, older
ones and those without TLS in `Origin`. Programs say neither, so they have to send the service token, which no browser adds
by itself.
"""

from urllib.parse import urlsplit

from multidict import CIMultiDictProxy

from scheduler.errors import ErrorCode, RequestError

OURS = ["same-origin"]


def check_same_site(headers: CIMultiDictProxy[str]) -> None:
    """Raises RequestError `cross_site` for what another page sent, or a browser that does not say which page did."""
    if not _is_ours(headers):
        raise RequestError(ErrorCode.CROSS_SITE)


def _is_ours(headers: CIMultiDictProxy[str]) -> bool:
    fetched_from = headers.getall("Sec-Fetch-Site", [])
    if fetched_from:
        return fetched_from == OURS
    origins = headers.getall("Origin", [])
    if origins:
        return len(origins) == 1 and _place(origins[0]) == headers.get("Host", "").lower()
    return "Authorization" in headers


def _place(origin: str) -> str | None:
    """Host and port of an origin; None where it is none, such as `null`."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None
