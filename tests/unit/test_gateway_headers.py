"""Rate-limit headers, durations and the bytes of an answer's head."""

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.answer import Answer
from gateway.bearer import bearer_token, check_service_token
from gateway.inference import trace_id
from gateway.key_states import KeyStates
from gateway.rate_headers import RateState, go_duration, rate_headers
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
    ("state", "policy", "limit", "openai"),
    [
        (RateState(10, 20, 19.9, 50), '"requests";q=20;w=2', '"requests";r=19;t=1', ("20", "19", "50ms")),
        (RateState(10, 20, 20, 0), '"requests";q=20;w=2', '"requests";r=20;t=0', ("20", "20", "0s")),
        (RateState(0.5, 1, 0.2, 1600), '"requests";q=1;w=2', '"requests";r=0;t=2', ("1", "0", "1.6s")),
        (RateState(0, 1, 0, 86_400_000), '"requests";q=1;w=1', '"requests";r=0;t=86400', ("1", "0", "24h0m0s")),
        (RateState(5, 7.5, 99, -3), '"requests";q=7;w=2', '"requests";r=7;t=0', ("7", "7", "0s")),
    ],
)
def test_the_limit_in_force_is_announced_in_both_forms(
    state: RateState, policy: str, limit: str, openai: tuple[str, str, str]
) -> None:
    """Draft 11 and OpenAI's headers say the same: bucket size, whole requests left, time until full."""
    sent = dict(rate_headers(state))

    assert (sent["RateLimit-Policy"], sent["RateLimit"]) == (policy, limit)
    names = ("limit", "remaining", "reset")
    assert tuple(sent[f"x-ratelimit-{name}-requests"] for name in names) == openai


def test_a_key_that_was_not_seen_is_announced_full() -> None:
    """Without a verdict the bucket is estimated: full when unknown, refilled since it was last seen otherwise."""
    states = KeyStates()
    assert states.estimate("k", 2.0, 10.0, now=100.0) == RateState(2.0, 10.0, 10.0, 0)

    states.of("k", 10.0, 100.0).remaining = 4.0
    assert states.estimate("k", 2.0, 10.0, now=101.0) == RateState(2.0, 10.0, 6.0, 2000)


def test_the_base_bucket_empties_and_refills() -> None:
    """The shadow of the base limit lets its burst through, then its rate."""
    state = KeyStates().of("k", 2.0, 0.0)

    assert [state.take_base(1.0, 2.0, at) for at in (0.0, 0.0, 0.0, 0.5, 1.0)] == [True, True, False, False, True]


def test_states_are_bounded() -> None:
    """A flood of keys drops the oldest."""
    states = KeyStates(max_keys=2)
    for name in "abc":
        states.of(name, 1.0, 0.0).remaining = 0.0

    assert len(states) == 2
    assert states.estimate("a", 1.0, 1.0, 0.0).remaining == 1.0
    assert states.estimate("c", 1.0, 1.0, 0.0).remaining == 0.0


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
    headers = headers_of(*(("Authorization", value) for value in values))
    if isinstance(expected, ErrorCode):
        with pytest.raises(RequestError) as caught:
            bearer_token(headers)
        assert caught.value.code is expected
    else:
        assert bearer_token(headers) == expected


@pytest.mark.parametrize(("token", "expected"), [("right", True), ("wrong", False), ("righ", False)])
def test_the_service_token_must_match(token: str, expected: bool) -> None:
    """A wrong service token is a wrong key; an empty expectation lets nobody in."""
    headers = headers_of(("Authorization", f"Bearer {token}"))
    if expected:
        check_service_token(headers, "right")
    else:
        with pytest.raises(RequestError, match="service token"):
            check_service_token(headers, "right")
    with pytest.raises(RequestError):
        check_service_token(headers, "")


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
    answer = Answer.of(503, {"a": 1}, [("x-request-id", "req_1")])
    lines = answer.head("close").decode().split("\r\n")

    assert lines[0] == "HTTP/1.1 503 Service Unavailable"
    assert lines[1:3] == ["Content-Type: application/json", "Content-Length: 7"]
    assert lines[3].startswith("Date: ")
    assert lines[3].endswith(" GMT")
    assert lines[4:] == ["x-request-id: req_1", "Connection: close", "", ""]
    assert answer.body == b'{"a":1}'
