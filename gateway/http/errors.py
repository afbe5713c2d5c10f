"""Error responses: from an error code to body, Retry-After with jitter, and x-should-retry.

Clients that accept `application/problem+json` get problem details (RFC 9457), with the types of the rate limit draft 11.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID

import msgspec
from msgspec import UNSET, UnsetType
from multidict import CIMultiDictProxy

from gateway.http.body.content_coding import EncodingError
from gateway.http.response import JSON, REASONS, Headers, HttpResponse
from scheduler.errors import HTTP, ErrorCode, RequestError

PROBLEM_JSON = "application/problem+json"
_TYPES = "https://iana.org/assignments/http-problem-types#"
_EXCEEDED = (f"{_TYPES}quota-exceeded", "The limit of this client is reached")
_REDUCED = (f"{_TYPES}temporary-reduced-capacity", "Less capacity is available for a while")
_KNOWN = {
    ErrorCode.RATE_LIMIT_EXCEEDED: _EXCEEDED,
    ErrorCode.TOO_MANY_CONNECTIONS: _EXCEEDED,
    ErrorCode.QUOTA_EXCEEDED: _EXCEEDED,
    ErrorCode.REDUCED_CAPACITY: _REDUCED,
    ErrorCode.SHED_FOR_PRIORITY: _REDUCED,
    ErrorCode.QUEUE_FULL: _REDUCED,
    ErrorCode.NO_CAPACITY: _REDUCED,
    ErrorCode.BACKPRESSURE: _REDUCED,
}


class Problem(msgspec.Struct, gc=False):
    """Problem details (RFC 9457). `violated-policies` are names in RateLimit-Policy."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    code: ErrorCode
    request_id: str
    param: str | None
    retry_after_ms: int | UnsetType = UNSET
    violated_policies: tuple[str, ...] | UnsetType = msgspec.field(default=UNSET, name="violated-policies")


_NO_WEIGHT = frozenset({"q=0", "q=0.0", "q=0.00", "q=0.000"})


def wants_problem(headers: CIMultiDictProxy[str]) -> bool:
    """Whether Accept contains problem details. `*/*` does not count, since most clients expect the default form."""
    for value in headers.getall("Accept", ()):
        for part in value.lower().split(","):
            media, _, parameters = part.partition(";")
            if media.strip() == PROBLEM_JSON:
                return _NO_WEIGHT.isdisjoint(each.strip() for each in parameters.split(";"))
    return False


JITTER = 0.25  # Up to this share is added to waits, so that clients do not retry at the same time.
MAX_RETRY_AFTER_MS = 60_000  # Longer predictions are not reliable.
MAX_WAIT_MS = (
    120_000  # No retry is requested after a longer wait: some clients would sleep for hours, others retry at once.
)
FALLBACK_RETRY_AFTER_MS = 1000
_EXACT = frozenset({ErrorCode.RATE_LIMIT_EXCEEDED, ErrorCode.QUOTA_EXCEEDED})  # Their waits are known exactly.

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


class RejectionError(RequestError):
    """A request error with the time until a retry can succeed, in milliseconds, and the violated rate limit policies.

    `headers`: the rate limit state, if it is known where the error is raised.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str | None = None,
        retry_after_ms: int | None = None,
        violated: tuple[str, ...] = (),
        headers: Headers | None = None,
    ) -> None:
        super().__init__(code, message)
        self.retry_after_ms = retry_after_ms
        self.violated = violated
        self.headers = headers


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
        if error.code not in _EXACT:
            wanted = min(wanted, MAX_RETRY_AFTER_MS)
        # The jitter of long waits is bounded: 15 s are enough to spread clients.
        return math.ceil(wanted + JITTER * self._jitter() * min(wanted, MAX_RETRY_AFTER_MS))


def problem_of(error: RequestError, request_id: str, retry_after_ms: int | UnsetType = UNSET) -> Problem:
    """The problem details for a request error. Codes without a registered type have about:blank and the HTTP reason."""
    status = HTTP[error.code].status
    type_, title = _KNOWN.get(error.code) or ("about:blank", REASONS[status])
    try:
        instance = UUID(request_id.removeprefix("req_")).urn
    except ValueError:
        instance = request_id
    return Problem(
        type=type_,
        title=title,
        status=status,
        detail=error.message,
        instance=instance,
        code=error.code,
        request_id=request_id,
        param=error.param,
        retry_after_ms=retry_after_ms,
        violated_policies=(error.violated if isinstance(error, RejectionError) else ()) or UNSET,
    )


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
