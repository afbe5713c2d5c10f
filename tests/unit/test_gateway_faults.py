"""Error answers: body, retry headers and jitter, for every code that there is."""

import json

import pytest

from gateway.answer import Answer
from gateway.faults import Faults, Refusal
from gateway.verdicts import refusal
from scheduler.admission import Verdict
from scheduler.errors import HTTP, ErrorCode, RequestError
from scheduler.states import Admission


def header(answer: Answer, name: str) -> str | None:
    return dict(answer.headers).get(name)


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_code_has_the_error_body_and_its_status(code: ErrorCode) -> None:
    """Each code gives its row's status, type and message, and the request id in body and header."""
    answer = Faults(lambda: 0.0).answer(RequestError(code, param="input"), "req_1")
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
    assert header(Faults(lambda: 0.0).answer(RequestError(code), "req_1"), "x-should-retry") == expected


@pytest.mark.parametrize(
    ("wanted_ms", "jitter", "sent_ms", "sent_s"),
    [
        (200, 0.0, "200", "1"),
        (200, 1.0, "250", "1"),
        (1000, 0.5, "1125", "2"),
        (3000, 0.0, "3000", "3"),
        (86_400_000, 0.0, "60000", "60"),
        (0, 0.0, "1000", "1"),
        (None, 0.0, "1000", "1"),
    ],
)
def test_the_wait_is_what_was_measured_and_up_to_a_quarter_more(
    wanted_ms: int | None, jitter: float, sent_ms: str, sent_s: str
) -> None:
    """Seconds are rounded up, milliseconds are exact, an unknown wait is a second, none is over a minute."""
    error = Refusal(ErrorCode.RATE_LIMIT_EXCEEDED, retry_after_ms=wanted_ms)
    answer = Faults(lambda: jitter).answer(error, "req_1")

    assert (header(answer, "retry-after-ms"), header(answer, "Retry-After")) == (sent_ms, sent_s)
    assert json.loads(answer.body)["error"]["retry_after_ms"] == int(sent_ms)


@pytest.mark.parametrize(
    ("outcome", "base_limit_allows", "code", "retry_ms"),
    [
        (Admission.KEY_LIMIT, False, ErrorCode.RATE_LIMIT_EXCEEDED, 70),
        (Admission.KEY_LIMIT, True, ErrorCode.REDUCED_CAPACITY, 70),
        (Admission.TIER_LIMIT, False, ErrorCode.REDUCED_CAPACITY, 70),
        (
            Admission.SHED,
            False,
            ErrorCode.SHED_FOR_PRIORITY,
            100,
        ),  # never less: its jitter must spread those who come back
        (Admission.QUEUE_FULL, True, ErrorCode.QUEUE_FULL, 100),
        (Admission.BACKPRESSURE, False, ErrorCode.BACKPRESSURE, 70),
    ],
)
def test_refusals_of_admission_have_their_codes(
    outcome: Admission, base_limit_allows: bool, code: ErrorCode, retry_ms: int
) -> None:
    """A key that only its lowered limit stopped is told of lowered capacity, not of its own rate."""
    error = refusal(Verdict(outcome, 0.0, 0, 70, 3), base_limit_allows=base_limit_allows)

    assert (error.code, error.retry_after_ms) == (code, retry_ms)
