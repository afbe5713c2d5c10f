"""Which origins a setting names, and which headers pages get."""

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.host_lists import origin_list
from gateway.http.cors import EXPOSED, Cors, serves_customers

PAGE = "https://app.example.com"


def headers(**values: str) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict({name.replace("_", "-"): value for name, value in values.items()}))


@pytest.mark.parametrize(
    ("text", "origins"),
    [
        ("", ()),
        ("*", ("*",)),
        (" https://A.example , http://localhost:3000,", ("https://a.example", "http://localhost:3000")),
        ("https://a.example:443,http://a.example:80", ("https://a.example", "http://a.example")),
        ("http://[::1]:8080,tauri://localhost", ("http://[::1]:8080", "tauri://localhost")),
    ],
)
def test_origins_are_read_as_browsers_send_them(text: str, origins: tuple[str, ...]) -> None:
    """Lower case, without a default port."""
    assert origin_list(text) == origins


@pytest.mark.parametrize(
    "text",
    [
        "null",
        "a.example",
        "https://a.example/",
        "https://a/b",
        "*,https://a",
        "https://*.a",
        "https://a:0",
        "https://ä",
    ],
)
def test_what_is_no_origin_is_named(text: str) -> None:
    """It would never match, so it is an error."""
    with pytest.raises(ValueError, match=r"origin"):
        origin_list(text)


def test_only_named_origins_are_allowed() -> None:
    """Others, none, and two at once get nothing but the hint to caches."""
    cors = Cors((PAGE, "http://localhost:3000"))
    allowed = cors.lines(headers(Origin=PAGE))

    assert f"Access-Control-Allow-Origin: {PAGE}\r\n" in allowed
    assert "Vary: Origin\r\n" in allowed
    assert f"Access-Control-Expose-Headers: {', '.join(EXPOSED)}\r\n" in allowed
    twice = CIMultiDictProxy(CIMultiDict([("Origin", PAGE), ("Origin", PAGE)]))
    for other in (headers(), headers(Origin="https://evil.example"), headers(Origin="null"), twice):
        assert cors.lines(other) == "Vary: Origin\r\n"


def test_every_origin_is_one_answer_for_all() -> None:
    """`*` depends on nobody; who sends no Origin is no page."""
    cors = Cors(("*",))

    assert cors.lines(headers(Origin="https://any.example")).startswith("Access-Control-Allow-Origin: *\r\n")
    assert cors.lines(headers()) == ""


def test_a_preflight_allows_what_clients_send() -> None:
    """Fixed names, and those of OpenAI's clients as far as they are such names; nothing else is repeated."""
    cors = Cors((PAGE,))
    asked = "authorization, x-stainless-os,x-stainless-<b>, x-evil, X-Stainless-Retry-Count"
    sent = {"Origin": PAGE, "Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": asked}
    answer = cors.preflight(headers(**sent), {"POST", "GET"}, "req_1")

    assert answer is not None
    told = dict(answer.headers)
    assert (answer.status, answer.body, told["Access-Control-Allow-Methods"]) == (204, b"", "GET, POST")
    allowed = told["Access-Control-Allow-Headers"].split(", ")
    assert {"Authorization", "Content-Type", "Idempotency-Key", "Prefer", "x-stainless-os"} <= set(allowed)
    assert "x-stainless-retry-count" in allowed
    assert not [name for name in allowed if "evil" in name or "<" in name]
    assert b"Content-Length" not in answer.head()
    for missing in ("Origin", "Access_Control_Request_Method"):
        assert cors.preflight(headers(**{k: v for k, v in sent.items() if k != missing}), {"POST"}, "req_1") is None


def test_what_a_page_must_read_is_exposed() -> None:
    """Limits, the id, when to try again, and whether an answer is a stored one."""
    assert {"x-request-id", "RateLimit", "RateLimit-Policy", "Retry-After", "retry-after-ms", "x-should-retry"} <= set(
        EXPOSED
    )
    assert {"x-ratelimit-remaining-tokens", "Idempotent-Replayed", "Location", "Server-Timing"} <= set(EXPOSED)
    assert "Set-Cookie" not in EXPOSED


@pytest.mark.parametrize(
    ("path", "is_one"),
    [("/v1/inference", True), ("/api/inference", True), ("/internal/health", False), ("/metrics", False), ("/", False)],
)
def test_the_api_of_customers(path: str, is_one: bool) -> None:  # a column of the table
    """Not what operators call."""
    assert serves_customers(path) is is_one
