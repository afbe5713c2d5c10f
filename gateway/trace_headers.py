"""The trace that a caller has begun, as its `traceparent` says. What is not W3C's form, or comes twice, is ignored."""

from multidict import CIMultiDictProxy

from scheduler.tracing import Context, read_traceparent

HEADER = "traceparent"


def caller_of(headers: CIMultiDictProxy[str]) -> Context | None:
    """The caller's span; None where it says nothing that is valid."""
    value = headers.get(HEADER)
    if not value or len(headers.getall(HEADER)) != 1:
        return None
    return read_traceparent(value)


def trace_id(headers: CIMultiDictProxy[str]) -> str:
    """The id of the caller's trace, or ""."""
    caller = caller_of(headers)
    return caller.trace_id if caller is not None else ""
