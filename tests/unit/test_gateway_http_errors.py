"""Error responses: body, status, retry headers and problem details, for every error code."""

import json
from typing import Any

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.http.error_responses import ErrorResponses
from gateway.http.errors import RejectionError
from gateway.http.problem_details import wants_problem
from gateway.http.response import HttpResponse
from scheduler.errors import HTTP, ErrorCode, RequestError

REQUEST_ID = "req_0198b0c5d2c07cc29a0d7a4f6f1e2d3c"
MENDED_BY_WAITING = {
    "catalog_unavailable", "rate_limit_exceeded", "too_many_connections", "backpressure", "reduced_capacity",
    "shed_for_priority", "queue_full", "no_capacity", "draining", "invalid_output", "worker_lost", "gateway_lost",
    "internal_error", "identity_provider_unavailable",
}  # fmt: skip


def respond(error: RequestError, jitter: float = 0.0, *, problem: bool = False) -> HttpResponse:
    return ErrorResponses(lambda: jitter).answer(error, REQUEST_ID, problem=problem)


def header(response: HttpResponse, name: str) -> str | None:
    return dict(response.headers).get(name)


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_code_has_its_body_and_headers(code: ErrorCode) -> None:
    """Status, type and message of the table, the request id, and retry headers where a retry makes sense."""
    response = respond(RequestError(code, param="input"))
    error = json.loads(response.body)["error"]

    assert response.status == HTTP[code].status
    assert (error["code"], error["type"], error["message"]) == (code, HTTP[code].type, HTTP[code].message)
    assert (error["param"], error["request_id"], header(response, "x-request-id")) == ("input", REQUEST_ID, REQUEST_ID)
    retryable = response.status in (429, 503) or code is ErrorCode.IDEMPOTENCY_IN_PROGRESS
    assert (header(response, "Retry-After") is not None) == ("retry_after_ms" in error) == retryable
    assert (header(response, "WWW-Authenticate") == "Bearer") == (response.status == 401)
    advice = {ErrorCode.IDEMPOTENCY_IN_PROGRESS: "true", ErrorCode.CANCELLED: None}.get(code, "false")
    assert header(response, "x-should-retry") == (None if code.value in MENDED_BY_WAITING else advice)


@pytest.mark.parametrize(
    ("code", "wait_ms", "jitter", "sent_ms", "sent_s"),
    [
        (ErrorCode.RATE_LIMIT_EXCEEDED, 200, 0.0, "200", "1"),
        (ErrorCode.RATE_LIMIT_EXCEEDED, 200, 1.0, "250", "1"),
        (ErrorCode.RATE_LIMIT_EXCEEDED, 1000, 0.5, "1125", "2"),
        (ErrorCode.RATE_LIMIT_EXCEEDED, 100_000, 1.0, "115000", "115"),
        (ErrorCode.RATE_LIMIT_EXCEEDED, 0, 0.0, "1000", "1"),
        (ErrorCode.RATE_LIMIT_EXCEEDED, None, 0.0, "1000", "1"),
        (ErrorCode.QUOTA_EXCEEDED, 110_000, 0.0, "110000", "110"),
        (ErrorCode.QUEUE_FULL, 600_000, 0.0, "60000", "60"),
    ],
)
def test_the_retry_wait(code: ErrorCode, wait_ms: int | None, jitter: float, sent_ms: str, sent_s: str) -> None:
    """The measured wait plus up to a quarter (at most 15 s) of jitter; seconds are rounded up; an unknown wait is a second.

    A predicted wait, such as that of a full queue, is a minute at most; the end of a quota window is known.
    """
    response = respond(RejectionError(code, retry_after_ms=wait_ms), jitter)

    assert (header(response, "retry-after-ms"), header(response, "Retry-After")) == (sent_ms, sent_s)
    assert json.loads(response.body)["error"]["retry_after_ms"] == int(sent_ms)


@pytest.mark.parametrize("code", [ErrorCode.RATE_LIMIT_EXCEEDED, ErrorCode.QUOTA_EXCEEDED])
def test_no_retry_is_requested_after_a_long_wait(code: ErrorCode) -> None:
    """Over two minutes the wait is in the body only: some clients would sleep for hours, and others retry at once."""
    response = respond(RejectionError(code, retry_after_ms=43_565_000))

    assert [header(response, name) for name in ("Retry-After", "retry-after-ms")] == [None, None]
    assert header(response, "x-should-retry") == "false"
    assert json.loads(response.body)["error"]["retry_after_ms"] == 43_565_000


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
        (RequestError(ErrorCode.CANCELLED, "Gone."), "about:blank", "Client Closed Request", {}),
    ],
)
def test_problem_details(error: RequestError, type_: str, title: str, more: dict[str, Any]) -> None:
    """RFC 9457 with the types of the rate-limit draft, and the same headers as the plain form."""
    response, plain = respond(error, problem=True), respond(error)

    assert json.loads(response.body) == {
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
    assert (response.content_type, plain.content_type) == ("application/problem+json", "application/json")
    assert (plain.headers, plain.status) == (response.headers, response.status)


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ([], False),
        (["*/*", "application/json", "application/*"], False),
        (["application/json, Application/Problem+JSON;q=0.5"], True),
        (["text/html", "application/problem+json"], True),
        (["application/problem+json;q=0"], False),
        (["application/problem+jsonx"], False),
    ],
)
def test_problem_details_must_be_named_in_accept(accept: list[str], expected: bool) -> None:
    """Clients that accept anything get the common form."""
    assert wants_problem(CIMultiDictProxy(CIMultiDict(("Accept", value) for value in accept))) is expected
