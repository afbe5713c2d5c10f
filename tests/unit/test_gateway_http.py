"""Parts of the HTTP server that need no socket: routes, timers, body budget, and CORS."""

import pytest
from aiohttp import http_parser
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.host_lists import origin_list
from gateway.http.body.budget import BodyBudget
from gateway.http.cors import EXPOSED, Cors
from gateway.http.errors import RejectionError
from gateway.http.response import HttpResponse
from gateway.http.router import (
    AT_VERSION,
    EXTRA_SLASHES,
    NEAR,
    NO_VERSION,
    TWO_ENDPOINTS,
    TWO_VERSIONS,
    ConnectionShare,
    CustomerConnections,
    RoutedRequest,
    Router,
)
from gateway.http.server import check_parser
from gateway.http.sse import ProgressTimers
from identities import identity
from scheduler.errors import RequestError, StartError

PAGE = "https://app.example.com"


def headers(**values: str) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict({name.replace("_", "-"): value for name, value in values.items()}))


def test_progress_timers_return_expired_items_in_order() -> None:
    """A running item keeps its first deadline; a stopped item never expires."""
    timers: ProgressTimers[str] = ProgressTimers(5.0)
    for name, now in (("a", 0.0), ("b", 1.0), ("a", 2.0), ("c", 2.0)):
        timers.start(name, now)
    timers.stop("b")

    assert [timers.expired(now) for now in (4.9, 5.0, 100.0)] == [[], ["a"], ["c"]]
    assert len(timers) == 0


async def handler(call: RoutedRequest) -> HttpResponse:
    return HttpResponse(200, call.tail.encode())


@pytest.mark.parametrize(
    ("path", "tail"),
    [
        ("/livez", ""),
        ("http://gateway:8080/livez?x=1", ""),
        ("/requests/req_1?x=/y", "req_1"),
        ("http://gateway", None),
        ("//livez", None),
        ("*", None),
        ("/livez/", None),
        ("", None),
        ("/requests/", None),
        ("/requests", None),
        ("/requests/a/b", None),
    ],
)
def test_a_path_is_exact_or_has_one_last_segment(path: str, tail: str | None) -> None:
    """Query, scheme and host are ignored, nothing else is."""
    routes = Router()
    routes.add("GET", "/livez", handler)
    routes.add("GET", "/requests/{id}", handler)

    found = routes.find(path)

    assert (found and (set(found[0]), found[1])) == (None if tail is None else ({"GET"}, tail))


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/models/a/b/infer?x=1", ({"POST"}, "a/b")),
        ("/models/a/infer/infer", ({"POST"}, "a/infer")),
        ("/models/a/b", ({"GET"}, "a/b")),
        ("/models/infer", ({"GET"}, "infer")),
        ("/models/", None),
    ],
)
def test_a_tree_may_have_a_suffix(path: str, found: tuple[set[str], str] | None) -> None:
    """The longest suffix wins, whatever the order of the routes; the tail is not empty."""
    routes = Router()
    routes.add("GET", "/models/{id...}", handler)
    routes.add("POST", "/models/{id...}/infer", handler)

    each = routes.find(path)

    assert (each and (set(each[0]), each[1])) == found
    assert routes.table() == {"/models/{id...}": {"GET"}, "/models/{id...}/infer": {"POST"}}


@pytest.mark.parametrize(
    ("path", "served"),
    [
        ("//v1/chat/completions", True),
        ("/v1//chat/completions/", True),
        ("/v1/chat/completions/?x=1", True),
        ("http://host//v1/chat/completions", True),
        ("//internal/health", False),
        ("/internal/health/", False),
        ("/internal//health", False),
    ],
)
def test_joined_slashes_are_left_out_in_the_api_of_customers(path: str, served: bool) -> None:
    """Other paths must be exact, so that a proxy which denies them by their beginning denies all ways to write them."""
    routes = Router()
    routes.add("POST", "/v1/chat/completions", handler)
    routes.add("GET", "/internal/health", handler)

    assert (routes.find(path) is not None) is served


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/v1/v1/messages", TWO_VERSIONS),
        ("/v1//v1/messages/", TWO_VERSIONS),
        ("/proxy/v1/v1/messages", TWO_VERSIONS),
        ("/messages", NO_VERSION),
        ("//internal/health", EXTRA_SLASHES),
        ("/internal//health/?x=1", EXTRA_SLASHES),
        ("/internal/other/", "There is no resource at this path: /docs lists all paths."),
        ("/v1/v1/other", "There is no resource at this path: /docs lists all paths."),
        ("/v1/chat/completions/chat/completions", AT_VERSION % "/chat/completions"),
        ("/v1/chat/completions/models", AT_VERSION % "/chat/completions"),
        ("/v1/messages/v1/messages", TWO_ENDPOINTS % "/v1/messages"),
        ("/v1/chat/completions/other", NEAR % "/v1/chat/completions"),
        ("/v1/chat/completion", NEAR % "/v1/chat/completions"),
        ("/V1/messages", NEAR % "/v1/messages"),
        ("/internal/healt", "There is no resource at this path: /docs lists all paths."),
        ("/other", "There is no resource at this path: /docs lists all paths."),
    ],
)
def test_a_mistake_in_a_path_is_named(path: str, message: str) -> None:
    """The error says what to change in the client, also about slashes where they are not left out; of other paths it names none."""
    routes = Router()
    routes.add("GET", "/v1/models", handler)
    routes.add("POST", "/v1/chat/completions", handler)
    routes.add("POST", "/v1/messages", handler)
    routes.add("GET", "/internal/health", handler)

    assert routes.not_found(path).message == message


def test_an_unsafe_parser_is_rejected_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed aiohttp passes; without its C parser, or in an old version, the gateway does not start."""
    check_parser()
    with monkeypatch.context() as patched:
        patched.setattr(http_parser, "HttpRequestParser", http_parser.HttpRequestParserPy)
        with pytest.raises(StartError, match="C parser"):
            check_parser()
    monkeypatch.setattr("aiohttp.__version__", "3.14.2")
    with pytest.raises(StartError, match="too old"):
        check_parser()


def test_a_response_head_is_complete_http() -> None:
    """Status line, type, length, date, the given headers, connection, empty line."""
    response = HttpResponse.of(503, {"a": 1}, [("x-request-id", "req_1")])
    lines = response.head("close").decode().split("\r\n")

    assert lines[:3] == ["HTTP/1.1 503 Service Unavailable", "Content-Type: application/json", "Content-Length: 7"]
    assert lines[3].startswith("Date: ")
    assert lines[3].endswith(" GMT")
    assert lines[4:] == ["x-request-id: req_1", "Connection: close", "", ""]
    assert response.body == b'{"a":1}'


def taken(budget: BodyBudget, customer: str, key: str, count: int) -> str:
    """Take bytes for one body and keep them; the code of the rejection, or an empty text."""
    try:
        budget.share(identity(customer_id=customer, key_id=key)).take(count)
    except RequestError as error:
        return error.code
    return ""


def test_body_bytes_are_limited_by_key_by_customer_and_in_all() -> None:
    """Rejected bytes are not counted."""
    budget = BodyBudget(in_all=100, of_customer=60, of_key=40)

    assert [taken(budget, "a", "a1", count) for count in (41, 40, 1)] == [
        "rate_limit_exceeded",
        "",
        "rate_limit_exceeded",
    ]
    assert [taken(budget, "a", "a2", count) for count in (21, 20)] == ["rate_limit_exceeded", ""]
    assert (taken(budget, "b", "b1", 40), taken(budget, "c", "c1", 1)) == ("", "no_capacity")
    assert budget.in_all == 100


def test_body_bytes_are_returned_once() -> None:
    """However often they are given back, and in however many parts they were taken; no entry is left."""
    budget = BodyBudget(in_all=100, of_customer=60, of_key=40)
    share = budget.share(identity(customer_id="a", key_id="a1"))
    for _ in range(4):
        share.take(10)
    with pytest.raises(RejectionError):
        share.take(1)
    share.give_back()
    share.give_back()

    assert (budget.in_all, budget._held) == (0, {})


def occupied(connection: ConnectionShare, customer: str) -> str:
    """Count a connection to a customer; the code of the rejection, or an empty text."""
    try:
        connection.occupy(customer)
    except RequestError as error:
        return error.code
    return ""


def test_connections_are_limited_by_customer() -> None:
    """A connection counts once, to the customer of its last request; of one that is refused it keeps the last one."""
    counts = CustomerConnections(2)
    first, second, third = (counts.share() for _ in range(3))

    assert [occupied(each, "a") for each in (first, first, second, third)] == ["", "", "", "too_many_connections"]
    assert [occupied(third, "b"), occupied(third, "a"), counts._held] == ["", "too_many_connections", {"a": 2, "b": 1}]
    assert [occupied(first, "b"), occupied(third, "a"), counts._held] == ["", "", {"a": 2, "b": 1}]


def test_closed_connections_count_no_more() -> None:
    """However often they are closed, with a customer or without one, and if a request is still in progress."""
    counts = CustomerConnections(2)
    used, unused = counts.share(), counts.share()
    used.occupy("a")
    for each in (used, used, unused):
        each.close()
    used.occupy("a")

    assert counts._held == {}


@pytest.mark.parametrize(
    ("text", "origins"),
    [
        ("", ()),
        ("*", ("*",)),
        (" https://A.example , http://localhost:3000,", ("https://a.example", "http://localhost:3000")),
        ("https://a.example:443,http://a.example:80", ("https://a.example", "http://a.example")),
        ("http://[::1]:8080,tauri://localhost", ("http://[::1]:8080", "tauri://localhost")),
        *((bad, None) for bad in ("null", "a.example", "https://a/b", "*,https://a", "https://*.a", "https://a:0")),
    ],
)
def test_cors_origins_are_normalized(text: str, origins: tuple[str, ...] | None) -> None:
    """To the form that browsers send; text that cannot match an origin is an error."""
    if origins is not None:
        assert origin_list(text) == origins
        return
    with pytest.raises(ValueError, match="origin"):
        origin_list(text)


def test_only_configured_origins_are_allowed() -> None:
    """Other origins, none, and two at once get only `Vary`; `*` allows every origin."""
    cors, twice = Cors((PAGE, "http://localhost:3000")), CIMultiDictProxy(CIMultiDict([("Origin", PAGE)] * 2))
    allowed = cors.lines(headers(Origin=PAGE))

    assert f"Access-Control-Allow-Origin: {PAGE}\r\n" in allowed
    assert f"Access-Control-Expose-Headers: {', '.join(EXPOSED)}\r\n" in allowed
    assert "Set-Cookie" not in EXPOSED
    for other in (headers(), headers(Origin="https://evil.example"), headers(Origin="null"), twice):
        assert cors.lines(other) == "Vary: Origin\r\n"
    assert Cors(("*",)).lines(headers(Origin="https://any.example")).startswith("Access-Control-Allow-Origin: *\r\n")
    assert Cors(("*",)).lines(headers()) == ""


def test_a_preflight_allows_known_headers_only() -> None:
    """A fixed list and the headers of OpenAI's clients, if they are valid names; other text is not repeated."""
    cors = Cors((PAGE,))
    requested = "authorization, x-stainless-os,x-stainless-<b>, x-evil, X-Stainless-Retry-Count"
    sent = {"Origin": PAGE, "Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": requested}
    response = cors.preflight(headers(**sent), {"POST", "GET"}, "req_1")

    assert response is not None
    assert (response.status, response.body) == (204, b"")
    assert dict(response.headers)["Access-Control-Allow-Methods"] == "GET, POST"
    allowed = dict(response.headers)["Access-Control-Allow-Headers"].split(", ")
    assert {"Authorization", "Idempotency-Key", "x-stainless-os", "x-stainless-retry-count"} <= set(allowed)
    assert not [name for name in allowed if "evil" in name or "<" in name]
    assert b"\r\nContent-Length" not in response.head()
    for missing in ("Origin", "Access_Control_Request_Method"):
        assert cors.preflight(headers(**{k: v for k, v in sent.items() if k != missing}), {"POST"}, "req_1") is None
