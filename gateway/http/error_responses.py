"""Error responses: from an error code to body, Retry-After with jitter, and x-should-retry."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType

from gateway.http.body.content_coding import EncodingError
from gateway.http.errors import RejectionError
from gateway.http.problem_details import PROBLEM_JSON, problem_of
from gateway.http.response import JSON, Headers, HttpResponse
from scheduler.errors import HTTP, ErrorCode, RequestError

JITTER = 0.25  # Up to this share is added to waits, so that clients do not retry at the same time.
MAX_RETRY_AFTER_MS = 60_000  # Longer predictions are not reliable.
MAX_WAIT_MS = 120_000
"""No retry is requested after a longer wait: some clients would sleep for hours, others retry at once."""
FALLBACK_RETRY_AFTER_MS = 1000
_EXACT_WAITS = frozenset({ErrorCode.RATE_LIMIT_EXCEEDED, ErrorCode.QUOTA_EXCEEDED})
# Waits if nothing was measured: short where another gateway or worker can serve the retry, else a second.
_RETRY_AFTER_MS = {
    ErrorCode.DRAINING: 100,
    ErrorCode.WORKER_LOST: 200,
    ErrorCode.GATEWAY_LOST: 200,
    ErrorCode.QUOTA_EXCEEDED: MAX_RETRY_AFTER_MS,
    ErrorCode.MODEL_TOO_SLOW: 10_000,
}

TRY_LATER = {code for code, row in HTTP.items() if row.status in (429, 503)} | {ErrorCode.IDEMPOTENCY_IN_PROGRESS}


class Fault(msgspec.Struct, gc=False):
    """The error object: message, OpenAI's type, the invalid field, Tierlane's code, and the wait before a retry."""

    message: str
    type: str
    param: str | None
    code: ErrorCode
    request_id: str
    retry_after_ms: int | UnsetType = UNSET


class ErrorBody(msgspec.Struct, gc=False):
    """The body of an error, in OpenAI's form."""

    error: Fault


@dataclass(frozen=True, slots=True)
class ResponseForm:
    """What an API has in a form of its own: errors, and headers of all responses.

    `error`: the body of an error, from the error, the request id, and the milliseconds until a retry if there are any.
    `lines`: more header lines, from the request id and the lines with the rate limits.
    """

    error: Callable[[RequestError, str, int | UnsetType], object]
    lines: Callable[[str, str], str]


class ErrorResponses:
    """Builds error responses. `jitter` returns a number from 0 to 1, and is called once per response with a Retry-After."""

    def __init__(self, jitter: Callable[[], float]) -> None:
        self._jitter = jitter

    def answer(
        self,
        error: RequestError,
        request_id: str,
        headers: Headers | None = None,
        *,
        problem: bool = False,
        form: ResponseForm | None = None,
    ) -> HttpResponse:
        """The response for `error`, with `headers` (rate limit state).

        `problem`: as problem details (RFC 9457). `form`: else in this form; None for OpenAI's.
        """
        row = HTTP[error.code]
        if headers is None and isinstance(error, RejectionError):
            headers = error.headers
        retry_after_ms: int | UnsetType = self._retry_after_ms(error) if error.code in TRY_LATER else UNSET
        document: object
        if problem:
            document = problem_of(error, request_id, retry_after_ms)
        elif form is not None:
            document = form.error(error, request_id, retry_after_ms)
        else:
            document = ErrorBody(fault_of(error, request_id, retry_after_ms))
        response = HttpResponse.of(row.status, document, content_type=PROBLEM_JSON if problem else JSON)
        response.headers = [("x-request-id", request_id), *(headers or ())]
        if form is not None:
            response.lines = form.lines(request_id, "".join(f"{name}: {value}\r\n" for name, value in headers or ()))
        retry = row.retry
        if retry_after_ms is not UNSET and retry_after_ms > MAX_WAIT_MS:
            retry = False
        elif retry_after_ms is not UNSET:
            response.headers.append(("Retry-After", str(math.ceil(retry_after_ms / 1000))))
            response.headers.append(("retry-after-ms", str(retry_after_ms)))
        if retry is not None:
            response.headers.append(("x-should-retry", "true" if retry else "false"))
        response.close = error.code is ErrorCode.TOO_MANY_CONNECTIONS
        if isinstance(error, EncodingError):
            response.headers.append(("Accept-Encoding", error.accepted))
        if row.status == 401:
            response.headers.append(("WWW-Authenticate", "Bearer"))
        return response

    def _retry_after_ms(self, error: RequestError) -> int:
        wanted = error.retry_after_ms if isinstance(error, RejectionError) else None
        if not wanted or wanted < 0:
            wanted = _RETRY_AFTER_MS.get(error.code, FALLBACK_RETRY_AFTER_MS)
        if error.code not in _EXACT_WAITS:
            wanted = min(wanted, MAX_RETRY_AFTER_MS)
        # The jitter of long waits is bounded: 15 s are enough to spread clients.
        return math.ceil(wanted + JITTER * self._jitter() * min(wanted, MAX_RETRY_AFTER_MS))


def fault_of(error: RequestError, request_id: str, retry_after_ms: int | UnsetType = UNSET) -> Fault:
    """The error object for a request error."""
    return Fault(
        message=error.message,
        type=HTTP[error.code].type,
        param=error.param,
        code=error.code,
        request_id=request_id,
        retry_after_ms=retry_after_ms,
    )
