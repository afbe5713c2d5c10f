"""Problem details (RFC 9457) for clients that accept `application/problem+json`, with the types of the rate limit draft 11."""

from uuid import UUID

import msgspec
from msgspec import UNSET, UnsetType
from multidict import CIMultiDictProxy

from gateway.http.errors import RejectionError
from gateway.http.response import REASONS
from scheduler.errors import HTTP, ErrorCode, RequestError

PROBLEM_JSON = "application/problem+json"
_TYPES = "https://iana.org/assignments/http-problem-types#"
_EXCEEDED = (f"{_TYPES}quota-exceeded", "The limit of this client is reached")
_REDUCED = (f"{_TYPES}temporary-reduced-capacity", "Less capacity is available for a while")
_PROBLEM_TYPES = {
    ErrorCode.RATE_LIMIT_EXCEEDED: _EXCEEDED,
    ErrorCode.TOO_MANY_CONNECTIONS: _EXCEEDED,
    ErrorCode.QUOTA_EXCEEDED: _EXCEEDED,
    ErrorCode.REDUCED_CAPACITY: _REDUCED,
    ErrorCode.SHED_FOR_PRIORITY: _REDUCED,
    ErrorCode.QUEUE_FULL: _REDUCED,
    ErrorCode.NO_CAPACITY: _REDUCED,
    ErrorCode.BACKPRESSURE: _REDUCED,
}

_NO_WEIGHT = frozenset({"q=0", "q=0.0", "q=0.00", "q=0.000"})


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


def wants_problem(headers: CIMultiDictProxy[str]) -> bool:
    """Whether Accept contains problem details. `*/*` does not count, since most clients expect the default form."""
    for value in headers.getall("Accept", ()):
        for part in value.lower().split(","):
            media, _, parameters = part.partition(";")
            if media.strip() == PROBLEM_JSON:
                return _NO_WEIGHT.isdisjoint(each.strip() for each in parameters.split(";"))
    return False


def problem_of(error: RequestError, request_id: str, retry_after_ms: int | UnsetType = UNSET) -> Problem:
    """The problem details for a request error. Codes without a registered type have about:blank and the HTTP reason."""
    status = HTTP[error.code].status
    type_, title = _PROBLEM_TYPES.get(error.code) or ("about:blank", REASONS[status])
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
