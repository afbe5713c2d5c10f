"""Spans of batches, where TIERLANE_TRACES_ENDPOINT asks for traces: a `batch` from claim to end, and an `infer` for each member.

A batch serves many requests, of which few are sampled. Its span stands in the trace of the first of them, and links to all;
the run of each other one stands in that one's own trace, and links to the batch. What the model gets, and an endpoint behind
it, is the context of that run.
"""

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from scheduler.errors import ErrorCode
from scheduler.payload import add_context, context_in
from scheduler.protocol.batches import ClaimedRequest, Outcome
from scheduler.tracing import Context, Span, SpanRole, Spans, new_span_id

MOST_MEMBERS = 128
"""Members of one batch that are followed: no span has more links in OpenTelemetry either."""

THEIRS = (ErrorCode.INVALID_REQUEST, ErrorCode.POISON_REQUEST)
"""Codes of runs that failed by what they were given."""


class BatchTrace:
    """One batch, from when it is this worker's until it is not: a block. `requests` is what is to be run.

    `began`: since when, in monotonic seconds. This one tells nothing: none of its members is sampled.
    """

    def __init__(self, requests: Sequence[ClaimedRequest], began: float) -> None:
        self.requests = requests
        self.began = began

    def begins(self) -> None:
        """The model begins."""

    def over(self) -> None:
        """The model has answered, or is lost."""

    def ended(self, outcomes: Sequence[Outcome]) -> None:
        """What has become of the members."""

    def lost(self, why: ErrorCode | None) -> None:
        """It ended without outcomes; None: it was handed back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """The batch is not this worker's any more."""


class _Member(NamedTuple):
    """A sampled one: its request's span, and the span of its run here."""

    id: str
    request: Context
    run: Context


class Sampled(BatchTrace):
    """A batch with members that are sampled, at least one. `clock` is monotonic seconds, `began` of it."""

    def __init__(
        self,
        spans: Spans,
        requests: Sequence[ClaimedRequest],
        members: Sequence[_Member],
        began: float,
        *,
        told: dict[str, str | int | float],
        clock: Callable[[], float],
    ) -> None:
        runs = {member.id: member.run for member in members}
        super().__init__([_carrying(request, runs.get(request.id)) for request in requests], began)
        self._spans = spans
        self._members = members
        self._clock = clock
        self._told = told
        self._ran: tuple[float, float] | None = None
        self._codes: dict[str, str] = {}
        self._failed = False

    def begins(self) -> None:
        """As `BatchTrace` says."""
        now = self._clock()
        self._ran = now, now

    def over(self) -> None:
        """As `BatchTrace` says."""
        if self._ran is not None:
            self._ran = self._ran[0], self._clock()

    def ended(self, outcomes: Sequence[Outcome]) -> None:
        """As `BatchTrace` says."""
        self._codes = {outcome.id: outcome.error_code for outcome in outcomes if outcome.error_code}

    def lost(self, why: ErrorCode | None) -> None:
        """As `BatchTrace` says. A run that had begun lasted until now."""
        self.over()
        self._failed = why is not None
        self._told["tierlane.outcome"] = "handed_back" if why is None else why.value

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if kind is not None:
            self.over()
            self._failed = True
        first = self._members[0].request
        batch = Context(first.trace_id, new_span_id())
        links = [member.request for member in self._members]
        span = Span(
            "batch", batch, first, self.began, self._clock(), self._told,
            SpanRole.CONSUMER, links, remote=True, failed=self._failed,
        )  # fmt: skip
        self._spans([span, *self._runs(batch)])

    def _runs(self, batch: Context) -> list[Span]:
        if self._ran is None:
            return []
        began, ended = self._ran
        first = self._members[0]
        spans = [self._run(first, batch, began, ended, [])]
        return spans + [self._run(each, each.request, began, ended, [batch]) for each in self._members[1:]]

    def _run(self, member: _Member, parent: Context, began: float, ended: float, links: list[Context]) -> Span:
        told: dict[str, str | int | float] = {"tierlane.request_id": member.id}
        if code := self._codes.get(member.id):
            told["error.type"] = code
        failed = self._failed or bool(code and code not in THEIRS)
        return Span("infer", member.run, parent, began, ended, told, links=links, remote=bool(links), failed=failed)


class BatchTraces:
    """What one worker tells. `spans` None: nothing is told of any batch."""

    def __init__(
        self, spans: Spans | None, worker_id: str, pool: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._spans = spans
        self._worker_id = worker_id
        self._pool = pool
        self._clock = clock

    def of(self, batch_id: str, requests: Sequence[ClaimedRequest], began: float) -> BatchTrace:
        """Of a batch that is this worker's since `began`."""
        if self._spans is None or not (members := sampled(requests)):
            return BatchTrace(requests, began)
        told: dict[str, str | int | float] = {
            "tierlane.batch_size": len(requests),
            "tierlane.attempt": requests[0].attempt,
            "tierlane.pool": self._pool,
            "tierlane.worker_id": self._worker_id,
        }
        if batch_id:
            told["tierlane.batch_id"] = batch_id
        return Sampled(self._spans, requests, members, began, told=told, clock=self._clock)


def sampled(requests: Sequence[ClaimedRequest]) -> list[_Member]:
    """The members that are sampled; of a list of inputs in one batch the first."""
    found: dict[Context, _Member] = {}
    for request in requests:
        context = context_in(request.body)
        if context is not None and context.sampled and context not in found and len(found) < MOST_MEMBERS:
            found[context] = _Member(request.id, context, Context(context.trace_id, new_span_id()))
    return list(found.values())


def _carrying(request: ClaimedRequest, run: Context | None) -> ClaimedRequest:
    return request if run is None else request._replace(body=add_context(request.body, run))
