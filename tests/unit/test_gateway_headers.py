"""Rate-limit headers, durations and the bytes of an answer's head."""

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from customer_limits import in_force
from gateway.auth.authenticator import bearer_token
from gateway.http.response import HttpResponse
from gateway.inference.traces import trace_id
from ratelimit.headers import go_duration, rate_headers
from ratelimit.limits import RemainingLimits
from scheduler.errors import ErrorCode, RequestError


def headers_of(*pairs: tuple[str, str]) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict(pairs))


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (0, "0s"),
        (12, "12ms"),
        (999, "999ms"),
        (1000, "1s"),
        (1500, "1.5s"),
        (59_999, "59.999s"),
        (60_000, "1m0s"),
        (360_000, "6m0s"),
        (3_600_000, "1h0m0s"),
        (86_400_000, "24h0m0s"),
    ],
)
def test_durations_are_written_as_go_does(milliseconds: int, text: str) -> None:
    """The form that OpenAI's clients know of x-ratelimit-reset-*."""
    assert go_duration(milliseconds) == text


@pytest.mark.parametrize(
    ("rate", "burst", "left", "policy", "limit", "openai"),
    [
        (10, 20, RemainingLimits([(19.9, 50)]), '"requests";q=20;w=2', '"requests";r=19;t=1', ("20", "19", "50ms")),
        (10, 20, RemainingLimits([(20, 0)]), '"requests";q=20;w=2', '"requests";r=20;t=0', ("20", "20", "0s")),
        (0.5, 1, RemainingLimits([(0.2, 1600)]), '"requests";q=1;w=2', '"requests";r=0;t=2', ("1", "0", "1.6s")),
        (
            0,
            1,
            RemainingLimits([(0, 86_400_000)]),
            '"requests";q=1;w=1',
            '"requests";r=0;t=86400',
            ("1", "0", "24h0m0s"),
        ),
        (5, 7.5, RemainingLimits([(99, -3)]), '"requests";q=7;w=2', '"requests";r=7;t=0', ("7", "7", "0s")),
    ],
)
def test_the_limit_in_force_is_announced_in_both_forms(
    rate: float, burst: float, left: RemainingLimits, policy: str, limit: str, openai: tuple[str, str, str]
) -> None:
    """Draft 11 and OpenAI's headers say the same: bucket size, whole requests left, time until full."""
    sent = dict(rate_headers(in_force(rate, burst), left))

    assert (sent["RateLimit-Policy"], sent["RateLimit"]) == (policy, limit)
    names = ("limit", "remaining", "reset")
    assert tuple(sent[f"x-ratelimit-{name}-requests"] for name in names) == openai
    assert not any(name.endswith("-tokens") for name in sent)


def test_each_limit_is_an_item_of_its_own() -> None:
    """Requests, tokens, concurrency and quotas, each by its policy's name, and tokens in OpenAI's form as well."""
    all_of_them = in_force(
        10, 20, tokens_per_minute=6000.0, max_concurrency=5, quotas=(("1day", 1000), ("2month", 9), ("1hour", 50))
    )
    left = RemainingLimits([(3.0, 1700), (1500.7, 44_990)], 2, ((998, 3_600_001), (9, 1000), (-1, 0)))
    sent = dict(rate_headers(all_of_them, left))

    assert sent["RateLimit-Policy"] == (
        '"requests";q=20;w=2, "tokens";q=6000;qu="tokens";w=60, "concurrency";q=5;qu="concurrent-requests", '
        '"day";q=1000;w=86400, "2months";q=9;w=5356800, "hour";q=50;w=3600'
    )
    assert sent["RateLimit"] == (
        '"requests";r=3;t=2, "tokens";r=1500;t=45, "concurrency";r=3, '
        '"day";r=998;t=3601, "2months";r=9;t=1, "hour";r=0;t=0'
    )
    tokens = {name: sent[f"x-ratelimit-{name}-tokens"] for name in ("limit", "remaining", "reset")}
    assert tokens == {"limit": "6000", "remaining": "1500", "reset": "44.99s"}


def test_a_debt_is_nothing_left_and_a_quota_that_is_not_known_is_not_made_up() -> None:
    """Below zero is zero; the policy of a quota is announced even while its state is not known."""
    sent = dict(
        rate_headers(
            in_force(1, 1, tokens_per_minute=60.0, quotas=(("1day", 7),)),
            RemainingLimits([(1, 0), (-50.0, 110_000)], 9),
        )
    )

    assert sent["RateLimit-Policy"].endswith(', "day";q=7;w=86400')
    assert sent["RateLimit"] == '"requests";r=1;t=0, "tokens";r=0;t=110'


def test_numbers_stay_within_what_a_structured_field_can_hold() -> None:
    """15 digits at most, whatever a row holds: a client that parses strictly would drop the whole field."""
    told = dict(
        rate_headers(in_force(5e-324, 1e7, tokens_per_minute=2.0**63), RemainingLimits([(1e7, 0), (2.0**63, 0)]))
    )

    assert '"requests";q=10000000;w=999999999999999' in told["RateLimit-Policy"]
    assert '"tokens";q=999999999999999;' in told["RateLimit-Policy"]
    assert '"tokens";r=999999999999999;' in told["RateLimit"]
    assert told["x-ratelimit-limit-tokens"] == told["x-ratelimit-remaining-tokens"] == "999999999999999"


def test_a_key_with_a_limit_of_its_own_is_told_the_smaller_of_both() -> None:
    """The key's own where that is less, the customer's where that is."""
    own = dict(rate_headers(in_force(100, 200, key_rate=2.0, key_burst=4.0), RemainingLimits([(3, 500)])))
    wide = dict(rate_headers(in_force(10, 20, key_rate=100.0, key_burst=200.0), RemainingLimits([(30, 500)])))

    assert (own["RateLimit-Policy"], own["x-ratelimit-limit-requests"]) == ('"requests";q=4;w=2', "4")
    assert (wide["RateLimit-Policy"], wide["x-ratelimit-remaining-requests"]) == ('"requests";q=20;w=2', "20")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["Bearer abc"], "abc"),
        (["bearer  abc "], "abc"),
        ([], ErrorCode.INVALID_API_KEY),
        (["Basic abc"], ErrorCode.INVALID_API_KEY),
        (["Bearer"], ErrorCode.INVALID_API_KEY),
        (["Bearer "], ErrorCode.INVALID_API_KEY),
        (["Bearer " + "x" * 256], "x" * 256),
        (["Bearer " + "x" * 257], ErrorCode.INVALID_API_KEY),
        (["Bearer \u00e9"], ErrorCode.INVALID_API_KEY),
        (["Bearer abc", "Bearer abc"], ErrorCode.INVALID_REQUEST),
    ],
)
def test_exactly_one_short_bearer_token_is_taken(values: list[str], expected: str) -> None:
    """Anything else has its code."""
    if isinstance(expected, ErrorCode):
        with pytest.raises(RequestError) as caught:
            bearer_token(values)
        assert caught.value.code is expected
    else:
        assert bearer_token(values) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "4bf92f3577b34da6a3ce929d0e0e4736"),
        ("00-00000000000000000000000000000000-00f067aa0ba902b7-01", ""),
        ("ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", ""),
        ("00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01", ""),
        ("nonsense", ""),
        (None, ""),
    ],
)
def test_only_a_valid_traceparent_is_taken(value: str | None, expected: str) -> None:
    """The trace id goes to the audit; what is not W3C's form is ignored."""
    assert trace_id(headers_of(*([("traceparent", value)] if value else []))) == expected


def test_the_head_of_an_answer_is_complete_http() -> None:
    """Status line, type, length, date, our headers, connection, empty line."""
    answer = HttpResponse.of(503, {"a": 1}, [("x-request-id", "req_1")])
    lines = answer.head("close").decode().split("\r\n")

    assert lines[0] == "HTTP/1.1 503 Service Unavailable"
    assert lines[1:3] == ["Content-Type: application/json", "Content-Length: 7"]
    assert lines[3].startswith("Date: ")
    assert lines[3].endswith(" GMT")
    assert lines[4:] == ["x-request-id: req_1", "Connection: close", "", ""]
    assert answer.body == b'{"a":1}'
