"""Spans of sampled requests, if TIERLANE_TRACES_ENDPOINT is set, and the caller's `traceparent` (W3C).

A sampled request is a TracedRequest, which records when Redis stored it; its spans are built at the end. No attribute
contains an input, an output, a key, or other text of the client, except `model`. A `traceparent` that is malformed, or
present twice, is ignored.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from multidict import CIMultiDictProxy

from gateway.inference.pending import PendingRequest, RequestTrace, ResponseSink
from ledger.catalog.snapshot import Identity
from scheduler.errors import HTTP, RequestError
from scheduler.protocol.admission import Submission
from scheduler.protocol.replies import Reply
from scheduler.tracing import Context, Span, SpanRole, Spans, new_span_id, new_trace_id, read_traceparent

TRACEPARENT = "traceparent"

ACCEPTED = 202
Attributes = Mapping[str, str | int | float]


def caller_of(headers: CIMultiDictProxy[str]) -> Context | None:
    """The caller's span; None without a valid traceparent."""
    value = headers.get(TRACEPARENT)
    if not value or len(headers.getall(TRACEPARENT)) != 1:
        return None
    return read_traceparent(value)


def trace_id(headers: CIMultiDictProxy[str]) -> str:
    """The id of the caller's trace, or ""."""
    caller = caller_of(headers)
    return caller.trace_id if caller is not None else ""


class TracedRequest(PendingRequest):
    """A pending request that is sampled."""

    __slots__ = ("_accepted", "_clock", "trace")

    def __init__(
        self,
        submission: Submission,
        started: float,
        *,
        sink: ResponseSink | None,
        created: float,
        trace: RequestTrace,
        clock: Callable[[], float],
    ) -> None:
        self.trace: RequestTrace = trace
        self._clock = clock
        super().__init__(submission, started, sink, created)

    @property
    def accepted(self) -> bool:
        """As in PendingRequest."""
        return self._accepted

    @accepted.setter
    def accepted(self, value: bool) -> None:
        self._accepted = value
        if value and self.trace.entered is None:
            self.trace.entered = self._clock()


class RequestTraces:
    """Samples calls and exports their spans. `share`: the sampled share of the calls, 0..1.

    `trust_callers`: the sampled flag of a caller's valid traceparent decides instead. `clock`: monotonic seconds.
    """

    def __init__(
        self,
        spans: Spans,
        share: float,
        *,
        trust_callers: bool = False,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._spans = spans
        self._share = share
        self._trust_callers = trust_callers
        self._clock = clock
        self._chance = chance

    def sampled(self, headers: CIMultiDictProxy[str], first: PendingRequest | None) -> RequestTrace | None:
        """The trace of a request, None if it is not sampled. Members of a list follow its `first`, None for that itself."""
        if first is not None:
            return first.trace
        caller = caller_of(headers) if self._trust_callers else None
        if not (caller.sampled if caller is not None else self._chance() < self._share):
            return None
        caller = caller or caller_of(headers)
        return RequestTrace(Context(caller.trace_id if caller else new_trace_id(), new_span_id()), caller)

    def pending(
        self,
        submission: Submission,
        started: float,
        *,
        sink: ResponseSink | None,
        created: float,
        trace: RequestTrace,
    ) -> PendingRequest:
        """A pending request that is sampled."""
        return TracedRequest(submission, started, sink=sink, created=created, trace=trace, clock=self._clock)

    def completed(
        self, endpoint: str, identity: Identity, pending: PendingRequest, replies: Sequence[Reply], seconds: float
    ) -> None:
        """Export the spans of a completed call; of a list the run of the first input."""
        if pending.trace is not None:
            first = replies[0]
            end = _RequestEnd(endpoint, first.id, 200, pending.started + seconds, first)
            more = {"tierlane.inputs": len(replies)} if len(replies) > 1 else {}
            self._export(identity, pending, pending.trace, end, more)

    def failed(
        self,
        endpoint: str,
        request_id: str,
        identity: Identity | None,
        pending: PendingRequest | None,
        error: RequestError,
    ) -> None:
        """Export the spans of a failed call. Calls without a pending request are never sampled."""
        if pending is None or pending.trace is None or identity is None:
            return
        reply = pending.outcome if isinstance(pending.outcome, Reply) else None
        end = _RequestEnd(endpoint, request_id, HTTP[error.code].status, self._clock(), reply)
        self._export(identity, pending, pending.trace, end, {"error.type": error.code.value})

    def accepted(self, endpoint: str, request_id: str, identity: Identity, pending: PendingRequest) -> None:
        """Export the span of a job's submission; its worker exports the run."""
        if pending.trace is not None:
            end = _RequestEnd(endpoint, request_id, ACCEPTED, self._clock(), None)
            self._export(identity, pending, pending.trace, end, {})

    def _export(
        self, identity: Identity, pending: PendingRequest, trace: RequestTrace, end: "_RequestEnd", more: Attributes
    ) -> None:
        attributes: dict[str, str | int | float] = {
            "http.request.method": "POST",
            "http.route": end.endpoint,
            "http.response.status_code": end.status,
            "tierlane.request_id": end.request_id,
            "tierlane.tier": identity.tier,
            "tierlane.model": pending.submission.model,
            **more,
            **(_run_attributes(end.reply) if end.reply else {}),
        }
        began, ended, failed = pending.started, end.at, end.status >= 500
        caller, kind = trace.caller, SpanRole.SERVER
        request = Span("request", trace.context, caller, began, ended, attributes, kind, remote=True, failed=failed)
        self._spans([request, *_wait_spans(pending, trace, end)])


class _RequestEnd(NamedTuple):
    """The result of a call. `at`: monotonic seconds. `request_id`: as in the response."""

    endpoint: str
    request_id: str
    status: int
    at: float
    reply: Reply | None


def _wait_spans(pending: PendingRequest, trace: RequestTrace, end: _RequestEnd) -> list[Span]:
    """Two spans: until Redis stored it, then its time in the tier queue as measured by Redis."""
    reply, entered = end.reply, trace.entered
    spans = [] if entered is None else [_child_span("enqueue", trace, pending.started, min(entered, end.at))]
    if reply is not None and reply.id == pending.id and reply.queue_ms >= 0:
        began = min(entered or pending.started, end.at)
        spans.append(_child_span("queue wait", trace, began, min(began + reply.queue_ms / 1000, end.at)))
    return spans


def _child_span(name: str, trace: RequestTrace, began: float, ended: float) -> Span:
    return Span(name, Context(trace.context.trace_id, new_span_id()), trace.context, began, ended, {})


def _run_attributes(reply: Reply) -> Attributes:
    """Attributes of the run. Encoding is most of the cost of a span, so attempts are included only if over 1."""
    attributes: dict[str, str | int | float] = {}
    if reply.attempts > 1:
        attributes["tierlane.attempts"] = reply.attempts
    if reply.batch_id:
        attributes |= {"tierlane.batch_id": reply.batch_id, "tierlane.batch_size": reply.batch_size}
    if reply.served_from:
        attributes["tierlane.served_from"] = reply.served_from
    return attributes
