"""Error answers: body, retry headers and jitter, for every code that there is."""

import json
import math
from typing import Any

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from customer_limits import in_force, remaining
from gateway.http.errors import ErrorResponses, RejectionError, wants_problem
from gateway.http.response import HttpResponse
from gateway.limits.rejections import refusal
from scheduler.errors import HTTP, ErrorCode, RequestError
from scheduler.protocol.admission import Verdict
from scheduler.states import Admission


def header(answer: HttpResponse, name: str) -> str | None:
    return dict(answer.headers).get(name)


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_code_has_the_error_body_and_its_status(code: ErrorCode) -> None:
    """Each code gives its row's status, type and message, and the request id in body and header."""
    answer = ErrorResponses(lambda: 0.0).answer(RequestError(code, param="input"), "req_1")
    error = json.loads(answer.body)["error"]

    assert answer.status == HTTP[code].status
    assert (error["code"], error["type"], error["message"]) == (code, HTTP[code].type, HTTP[code].message)
    assert (error["param"], error["request_id"]) == ("input", "req_1")
    assert header(answer, "x-request-id") == "req_1"
    try_later = answer.status in (429, 503) or code is ErrorCode.IDEMPOTENCY_IN_PROGRESS
    assert (header(answer, "Retry-After") is not None) == ("retry_after_ms" in error) == try_later
    assert (header(answer, "WWW-Authenticate") == "Bearer") == (answer.status == 401)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (ErrorCode.QUOTA_EXCEEDED, "false"),
        (ErrorCode.QUEUE_TIMEOUT, "false"),
        (ErrorCode.DEADLINE_EXCEEDED, "false"),
        (ErrorCode.POISON_REQUEST, "false"),
        (ErrorCode.RATE_LIMIT_EXCEEDED, None),
        (ErrorCode.WORKER_LOST, None),
    ],
)
def test_clients_are_told_where_a_retry_is_wrong(code: ErrorCode, expected: str | None) -> None:
    """`x-should-retry` is sent only where the client's own rule for the status would be wrong."""
    assert header(ErrorResponses(lambda: 0.0).answer(RequestError(code), "req_1"), "x-should-retry") == expected


@pytest.mark.parametrize(
    ("wanted_ms", "jitter", "sent_ms", "sent_s"),
    [
        (200, 0.0, "200", "1"),
        (200, 1.0, "250", "1"),
        (1000, 0.5, "1125", "2"),
        (3000, 0.0, "3000", "3"),
        (86_400_000, 0.0, "86400000", "86400"),
        (86_400_000, 1.0, "86415000", "86415"),
        (0, 0.0, "1000", "1"),
        (None, 0.0, "1000", "1"),
    ],
)
def test_the_wait_is_what_was_measured_and_up_to_a_quarter_more(
    wanted_ms: int | None, jitter: float, sent_ms: str, sent_s: str
) -> None:
    """Seconds are rounded up, milliseconds are exact, an unknown wait is a second, jitter at most a quarter minute."""
    error = RejectionError(ErrorCode.RATE_LIMIT_EXCEEDED, retry_after_ms=wanted_ms)
    answer = ErrorResponses(lambda: jitter).answer(error, "req_1")

    assert (header(answer, "retry-after-ms"), header(answer, "Retry-After")) == (sent_ms, sent_s)
    assert json.loads(answer.body)["error"]["retry_after_ms"] == int(sent_ms)


def test_what_is_only_predicted_is_not_told_for_more_than_a_minute() -> None:
    """The end of a quota's window is known; how long a line stands still is not."""
    told = {}
    for code in (ErrorCode.QUEUE_FULL, ErrorCode.QUOTA_EXCEEDED):
        answer = ErrorResponses(lambda: 0.0).answer(RejectionError(code, retry_after_ms=600_000), "req_1")
        told[code] = header(answer, "Retry-After")

    assert told == {ErrorCode.QUEUE_FULL: "60", ErrorCode.QUOTA_EXCEEDED: "600"}


REQUEST_ID = "req_0198b0c5d2c07cc29a0d7a4f6f1e2d3c"


@pytest.mark.parametrize(
    ("error", "type_", "title", "more"),
    [
        (
            RejectionError(ErrorCode.QUOTA_EXCEEDED, "Used up.", 5000, ("day",)),
            "https://iana.org/assignments/http-problem-types#quota-exceeded",
            "The limit of this client is reached",
            {"retry_after_ms": 5000, "violated-policies": ["day"]},
        ),
        (
            RejectionError(ErrorCode.SHED_FOR_PRIORITY, "Shed.", 300),
            "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity",
            "Less capacity is available for a while",
            {"retry_after_ms": 300},
        ),
        (RequestError(ErrorCode.MODEL_NOT_FOUND, "None.", "model"), "about:blank", "Not Found", {}),
        (RequestError(ErrorCode.CANCELLED, "Gone."), "about:blank", "Client Closed Request", {}),
    ],
)
def test_errors_as_problem_details(error: RequestError, type_: str, title: str, more: dict[str, Any]) -> None:
    """RFC 9457 with the draft's types, what our own form says, and the same headers."""
    answer = ErrorResponses(lambda: 0.0).answer(error, REQUEST_ID, problem=True)
    plain = ErrorResponses(lambda: 0.0).answer(error, REQUEST_ID)

    assert json.loads(answer.body) == {
        "type": type_,
        "title": title,
        "status": HTTP[error.code].status,
        "detail": error.message,
        "instance": "urn:uuid:0198b0c5-d2c0-7cc2-9a0d-7a4f6f1e2d3c",
        "code": error.code,
        "request_id": REQUEST_ID,
        "param": error.param,
        **more,
    }
    assert answer.content_type == "application/problem+json"
    assert (plain.content_type, plain.headers, plain.status) == ("application/json", answer.headers, answer.status)


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ([], False),
        (["*/*"], False),
        (["application/json"], False),
        (["application/*"], False),
        (["application/problem+json"], True),
        (["application/json, Application/Problem+JSON;q=0.5"], True),
        (["text/html", "application/problem+json"], True),
        (["application/problem+json;q=0"], False),
        (["application/problem+jsonx"], False),
    ],
)
def test_problem_details_are_for_those_who_name_them(accept: list[str], expected: bool) -> None:
    """Accept has to name the type; what takes anything gets the form that most clients know."""
    assert wants_problem(CIMultiDictProxy(CIMultiDict(("Accept", value) for value in accept))) is expected


@pytest.mark.parametrize(
    ("outcome", "base_limit_allows", "code", "retry_ms"),
    [
        (Admission.KEY_LIMIT, False, ErrorCode.RATE_LIMIT_EXCEEDED, 70),
        (Admission.KEY_LIMIT, True, ErrorCode.REDUCED_CAPACITY, 70),
        (Admission.CUSTOMER_LIMIT, False, ErrorCode.RATE_LIMIT_EXCEEDED, 70),
        (Admission.CUSTOMER_LIMIT, True, ErrorCode.REDUCED_CAPACITY, 70),
        (Admission.TOKEN_LIMIT, False, ErrorCode.RATE_LIMIT_EXCEEDED, 70),
        (Admission.TOKEN_LIMIT, True, ErrorCode.REDUCED_CAPACITY, 70),
        (Admission.CONCURRENCY, True, ErrorCode.RATE_LIMIT_EXCEEDED, 250),  # The factor does not lower it.
        (Admission.QUOTA, True, ErrorCode.QUOTA_EXCEEDED, 70),
        (Admission.TIER_LIMIT, False, ErrorCode.REDUCED_CAPACITY, 250),
        # Never less: its jitter must spread those who come back.
        (Admission.SHED, False, ErrorCode.SHED_FOR_PRIORITY, 100),
        (Admission.QUEUE_FULL, True, ErrorCode.QUEUE_FULL, 100),
        (Admission.WAIT, True, ErrorCode.QUEUE_FULL, 100),
        (Admission.BACKPRESSURE, False, ErrorCode.BACKPRESSURE, 70),
    ],
)
def test_refusals_of_admission_have_their_codes(
    outcome: Admission, base_limit_allows: bool, code: ErrorCode, retry_ms: int
) -> None:
    """Who only a lowered limit stopped is told of lowered capacity, not of an own rate."""
    error = refusal(Verdict(outcome, retry_after_ms=70, depth=3), base_limit_allows=base_limit_allows)

    assert (error.code, error.retry_after_ms) == (code, retry_ms)


@pytest.mark.parametrize("outcome", [Admission.SHED, Admission.QUEUE_FULL, Admission.WAIT, Admission.TIER_LIMIT])
def test_those_who_stand_in_line_are_told_how_fast_it_moves(outcome: Admission) -> None:
    """Twenty wait and ten a second are answered: come back in two seconds."""
    assert (
        refusal(Verdict(outcome, retry_after_ms=70, depth=20), base_limit_allows=False, drain_rps=10.0).retry_after_ms
        == 2000
    )


@pytest.mark.parametrize(
    ("pressure", "retry_ms"), [(0.5, 250), (1.0, 250), (2.0, 500), (10.0, 2500), (math.inf, 30_000)]
)
def test_a_crowd_at_a_full_bucket_is_told_to_come_so_much_rarer(pressure: float, retry_ms: int) -> None:
    """Ten times what fits: ten times as long, or obedient clients would come back four times a second each."""
    told = refusal(Verdict(Admission.TIER_LIMIT, retry_after_ms=5), base_limit_allows=False, pressure=pressure)

    assert told.retry_after_ms == retry_ms


def test_a_wait_that_is_too_long_is_not_called_a_full_queue() -> None:
    """The code is the contract's, the sentence says what it was."""
    assert (
        "predicted wait"
        in refusal(Verdict(Admission.WAIT, retry_after_ms=70, depth=3), base_limit_allows=False).message
    )


def test_a_tiny_lowered_rate_is_not_taken_for_a_promise() -> None:
    """A limit that stands at nearly nothing for a moment says a minute at most; one that was agreed says all of it."""
    verdict = Verdict(Admission.CUSTOMER_LIMIT, retry_after_ms=3_000_000, depth=3)

    assert refusal(verdict, base_limit_allows=False, factor=0.01).retry_after_ms == 60_000
    assert refusal(verdict, base_limit_allows=False).retry_after_ms == 3_000_000


LIMITS = in_force(
    rate=50.0,
    burst=20.0,
    tokens_per_minute=6000.0,
    max_concurrency=7,
    quotas=(("1day", 1000), ("1month", 20_000)),
    key_rate=2.5,
    key_burst=5.0,
)


@pytest.mark.parametrize(
    ("outcome", "message", "violated"),
    [
        (
            Admission.KEY_LIMIT,
            "The rate limit of this API key, 2.5 requests/s (burst 5), is reached.",
            ("requests",),
        ),
        (
            Admission.CUSTOMER_LIMIT,
            "The rate limit of this account, 50 requests/s (burst 20), is reached.",
            ("requests",),
        ),
        (Admission.TOKEN_LIMIT, "The rate limit of this account, 6000 tokens per minute, is reached.", ("tokens",)),
        (
            Admission.CONCURRENCY,
            "The concurrency limit of this account, 7 requests at a time, is reached.",
            ("concurrency",),
        ),
        (Admission.QUOTA, "The quota of this account, 20000 requests per month, is used up.", ("month",)),
        (Admission.TIER_LIMIT, HTTP[ErrorCode.REDUCED_CAPACITY].message, ()),
    ],
)
def test_a_refusal_names_the_limit_and_its_number(outcome: Admission, message: str, violated: tuple[str, ...]) -> None:
    """Which limit, whose, and how much it is now; and the policy as the headers call it."""
    verdict = Verdict(outcome, remaining(quotas=((12, 1000), (0, 9000))), 70, 3)
    error = refusal(verdict, base_limit_allows=False, limits=LIMITS)

    assert (error.message, error.violated) == (message, violated)


def test_a_lowered_limit_says_that_it_is_lowered() -> None:
    """The number is that of now, and the reason stands beside it."""
    verdict = Verdict(Admission.TOKEN_LIMIT, retry_after_ms=70, depth=3)
    error = refusal(verdict, base_limit_allows=True, limits=in_force(tokens_per_minute=1500.0), factor=0.25)

    assert error.message == (
        "The rate limit of this account, 1500 tokens per minute, is reached. It is reduced while less capacity is available."
    )
