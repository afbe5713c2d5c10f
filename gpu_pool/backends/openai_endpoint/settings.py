"""The URL of an endpoint, parsed from the text after `openai:`. No I/O."""

from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from scheduler.errors import StartError

PREFIX = "openai:"
FORM = "openai:http://HOST:PORT/v1#MODEL"
_VERSION = "/v1"


@dataclass(frozen=True, slots=True)
class EndpointUrl:
    """`base` has the routes (`<base>/completions`), `root` the server's health; `model` is "" if the server may choose."""

    base: str
    root: str
    model: str


def read_address(spec: str) -> EndpointUrl:
    """The address in `openai:URL[#MODEL]`; a URL without a path gets `/v1`. Raises StartError with what is wrong."""
    try:
        url = urlsplit(spec.removeprefix(PREFIX))
        fault = _fault(url)
    except ValueError as error:  # An invalid port, or an unclosed bracket.
        fault = str(error)
    if fault:
        raise StartError(f"Backend {_shown(spec)!r}: {fault}; use {FORM}.")
    path = url.path.rstrip("/") or _VERSION
    place = f"{url.scheme}://{url.netloc}"
    return EndpointUrl(place + path, place + path.removesuffix(_VERSION), url.fragment)


def _fault(url: SplitResult) -> str:
    if url.scheme not in ("http", "https"):
        return "the URL must begin with http:// or https://"
    if url.username is not None or url.password is not None:
        return "the URL must not hold a name or password: set TIERLANE_ENDPOINT_API_KEY instead"
    if not url.hostname:
        return "the URL names no host"
    if url.query:
        return "the URL must not have a query"
    return "" if url.port != 0 else "the URL's port must not be 0"


def _shown(spec: str) -> str:
    """The spec without what may be a password or a key."""
    place, query, _ = spec.partition("?")
    scheme, at, rest = place.rpartition("@")
    return (f"{scheme.partition('//')[0]}//...@{rest}" if at else place) + (query and "?...")
