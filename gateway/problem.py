"""Errors as RFC 9457 problem details, for clients whose Accept names that type; the types are those of draft 11."""

from http import HTTPStatus
from uuid import UUID

import msgspec
from msgspec import UNSET, UnsetType
from multidict import CIMultiDictProxy

from gateway.http.response import encode_json
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
