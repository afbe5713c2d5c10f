"""Error responses: the one place that turns an error code into body, Retry-After with jitter and x-should-retry.

Clients whose Accept names `application/problem+json` get problem details (RFC 9457), with the types of draft 11.
"""

import math
from collections.abc import Callable
from http import HTTPStatus
from uuid import UUID

import msgspec
from msgspec import UNSET, UnsetType
from multidict import CIMultiDictProxy

from gateway.http.response import JSON, Headers, HttpResponse, encode_json
from scheduler.errors import HTTP, ErrorCode, RequestError

PROBLEM_JSON = "application/problem+json"
_TYPES = "https://iana.org/assignments/http-problem-types#"
_EXCEEDED = (f"{_TYPES}quota-exceeded", "The limit of this client is reached")
_REDUCED = (f"{_TYPES}temporary-reduced-capacity", "Less capacity is available for a while")
_KNOWN = {
    ErrorCode.RATE_LIMIT_EXCEEDED: _EXCEEDED,
    ErrorCode.QUOTA_EXCEEDED: _EXCEEDED,
    ErrorCode.REDUCED_CAPACITY: _REDUCED,
    ErrorCode.SHED_FOR_PRIORITY: _REDUCED,
    ErrorCode.QUEUE_FULL: _REDUCED,
    ErrorCode.NO_CAPACITY: _REDUCED,
    ErrorCode.BACKPRESSURE: _REDUCED,
}


class Problem(msgspec.Struct, gc=False):
    """Problem details (RFC 9457) with our members; `violated-policies` are names of RateLimit-Policy."""

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
    """Whether Accept names problem details; `*/*` does not, since our own form is what most clients read."""
    for value in headers.getall("Accept", ()):
        for part in value.lower().split(","):
            media, _, parameters = part.partition(";")
            if media.strip() == PROBLEM_JSON:
                return _NO_WEIGHT.isdisjoint(each.strip() for each in parameters.split(";"))
    return False


def problem_body(
    error: RequestError, request_id: str, retry_after_ms: int | None, violated: tuple[str, ...] = ()
) -> bytes:
    """The document. A code without a type of its own is told as its HTTP status, as the RFC has it for about:blank."""
    status = HTTP[error.code].status
    type_, title = _KNOWN.get(error.code) or ("about:blank", _phrase(status))
    problem = Problem(
        type=type_,
        title=title,
        status=status,
        detail=error.message,
        instance=_instance(request_id),
        code=error.code,
        request_id=request_id,
        param=error.param,
        retry_after_ms=UNSET if retry_after_ms is None else retry_after_ms,
        violated_policies=violated or UNSET,
    )
    return encode_json(problem)


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:  # 499 is nobody's but nginx's.
        return "Client Closed Request"


def _instance(request_id: str) -> str:
    """A request id is a UUID, so its URI is that UUID's."""
    try:
        return UUID(request_id.removeprefix("req_")).urn
    except ValueError:
        return request_id


JITTER = 0.25  # Up to this share is added to what a client is told to wait, so that clients do not return together.
MAX_RETRY_AFTER_MS = 60_000  # Predictions are not trusted any further.
FALLBACK_RETRY_AFTER_MS = 1000
_EXACT = frozenset({ErrorCode.RATE_LIMIT_EXCEEDED, ErrorCode.QUOTA_EXCEEDED})  # Waits that are known, however long.

# How long to wait where nothing was measured: what is over in a moment anywhere else, and the rest a second.
_RETRY_AFTER_MS = {
    ErrorCode.DRAINING: 100,
    ErrorCode.WORKER_LOST: 200,
    ErrorCode.GATEWAY_LOST: 200,
    ErrorCode.QUOTA_EXCEEDED: MAX_RETRY_AFTER_MS,
}

TRY_LATER = {code for code, row in HTTP.items() if row.status in (429, 503)} | {ErrorCode.IDEMPOTENCY_IN_PROGRESS}


class Fault(msgspec.Struct, gc=False):
    """What went wrong: a sentence, OpenAI's type for it, the field at fault, our code, and when to try again."""

    message: str
    type: str
    param: str | None
    code: ErrorCode
    request_id: str
    retry_after_ms: int | UnsetType = UNSET


class ErrorBody(msgspec.Struct, gc=False):
    """The body of every error, in the form that OpenAI's clients read."""

    error: Fault


class RejectionError(RequestError):
    """A request error that also knows when trying again makes sense (milliseconds from now).

    `violated` names the rate-limit policies that stood in the way.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str | None = None,
        retry_after_ms: int | None = None,
        violated: tuple[str, ...] = (),
    ) -> None:
        super().__init__(code, message)
        self.retry_after_ms = retry_after_ms
        self.violated = violated


class ErrorResponses:
    """Builds error answers. `jitter` returns a number from 0 to 1 and is called once for an answer that needs one."""

    def __init__(self, jitter: Callable[[], float]) -> None:
        self._jitter = jitter

    def answer(
        self, error: RequestError, request_id: str, headers: Headers | None = None, *, problem: bool = False
    ) -> HttpResponse:
        """The answer for `error`; `headers` (rate-limit state) are sent with it. `problem`: in the form of RFC 9457."""
        row = HTTP[error.code]
        retry_after_ms = self._retry_after_ms(error) if error.code in TRY_LATER else None
        body = (_problem if problem else _body)(error, request_id, retry_after_ms)
        answer = HttpResponse(row.status, body, content_type=PROBLEM_JSON if problem else JSON)
        answer.headers = [("x-request-id", request_id), *(headers or ()), *_retry_headers(error.code, retry_after_ms)]
        if row.status == 401:
            answer.headers.append(("WWW-Authenticate", "Bearer"))
        return answer

    def _retry_after_ms(self, error: RequestError) -> int:
        wanted = error.retry_after_ms if isinstance(error, RejectionError) else None
        if not wanted or wanted < 0:
            wanted = _RETRY_AFTER_MS.get(error.code, FALLBACK_RETRY_AFTER_MS)
        if error.code not in _EXACT:
            wanted = min(wanted, MAX_RETRY_AFTER_MS)
        # A quarter of a minute spreads everybody well enough; a quarter of a month would be a punishment.
        return math.ceil(wanted + JITTER * self._jitter() * min(wanted, MAX_RETRY_AFTER_MS))


def _problem(error: RequestError, request_id: str, retry_after_ms: int | None) -> bytes:
    violated = error.violated if isinstance(error, RejectionError) else ()
    return problem_body(error, request_id, retry_after_ms, violated)


def _body(error: RequestError, request_id: str, retry_after_ms: int | None) -> bytes:
    return encode_json(ErrorBody(fault_of(error, request_id, UNSET if retry_after_ms is None else retry_after_ms)))


def fault_of(error: RequestError, request_id: str, retry_after_ms: int | UnsetType = UNSET) -> Fault:
    """What is told of an error in JSON."""
    return Fault(
        message=error.message,
        type=HTTP[error.code].type,
        param=error.param,
        code=error.code,
        request_id=request_id,
        retry_after_ms=retry_after_ms,
    )


def _retry_headers(code: ErrorCode, retry_after_ms: int | None) -> Headers:
    headers: Headers = []
    if retry_after_ms is not None:
        headers += [
            ("Retry-After", str(math.ceil(retry_after_ms / 1000))),
            ("retry-after-ms", str(retry_after_ms)),
        ]
    if (retry := HTTP[code].retry) is not None:
        headers.append(("x-should-retry", "true" if retry else "false"))
    return headers
