"""The URL of a model server, parsed from the text after `openai:` or `oip:`. No I/O."""

from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from scheduler.errors import StartError

PREFIX = "openai:"
OPEN_INFERENCE = "oip:"
SERVERS = (PREFIX, OPEN_INFERENCE)
"""Prefixes of the backends with a model server behind them."""
_FORMS = {PREFIX: "openai:http://HOST:PORT/v1#MODEL", OPEN_INFERENCE: "oip:http://HOST:PORT#MODEL"}


@dataclass(frozen=True, slots=True)
class EndpointUrl:
    """`base` has the routes (`<base>/completions`), `root` the server's health; `model` is "" if the server may choose."""

    base: str
    root: str
    model: str


def read_address(spec: str) -> EndpointUrl:
    """The address in `openai:URL[#MODEL]`, whose URL gets `/v1` if it has no path, or in `oip:URL#MODEL`, whose URL gets
    `/v2` unless it ends with it. Raises StartError with what is wrong.
    """
    prefix = OPEN_INFERENCE if spec.startswith(OPEN_INFERENCE) else PREFIX
    try:
        url = urlsplit(spec.removeprefix(prefix))
        fault = _fault(url, prefix)
    except ValueError as error:  # An invalid port, or an unclosed bracket.
        fault = str(error)
    if fault:
        # Without what may be a password or a key.
        shown, query, _ = spec.partition("?")
        scheme, at, rest = shown.rpartition("@")
        shown = (f"{scheme.partition('//')[0]}//...@{rest}" if at else shown) + (query and "?...")
        raise StartError(f"Backend {shown!r}: {fault}; use {_FORMS[prefix]}.")
    place, path = f"{url.scheme}://{url.netloc}", url.path.rstrip("/")
    if prefix == PREFIX:
        path = path or "/v1"
        return EndpointUrl(place + path, place + path.removesuffix("/v1"), url.fragment)
    root = place + path.removesuffix("/v2")
    return EndpointUrl(f"{root}/v2", root, url.fragment)


def _fault(url: SplitResult, prefix: str) -> str:
    if url.scheme not in ("http", "https"):
        return "the URL must begin with http:// or https://"
    if url.username is not None or url.password is not None:
        return "the URL must not hold a name or password: set TIERLANE_ENDPOINT_API_KEY instead"
    if not _is_host(url.hostname or ""):
        return "the URL's host name is not valid" if url.hostname else "the URL names no host"
    if url.query:
        return "the URL must not have a query"
    if prefix == OPEN_INFERENCE and not url.fragment:
        return "the URL names no model"
    return "" if url.port != 0 else "the URL's port must not be 0"


def _is_host(name: str) -> bool:
    """Whether a host name can be looked up: a part that is empty or longer than 63 characters would raise an error there."""
    try:
        return bool(name.encode("idna")) and not any(each.isspace() for each in name)
    except UnicodeError:
        return False
