"""Spans of batches, if TIERLANE_TRACES_ENDPOINT is set: a `batch` span from claim to end, and an `infer` span for each
member.

A batch serves many requests, few of which are sampled. Its span is in the trace of the first sampled one, and links to
all of them; the run of each other one is in that one's own trace, and links to the batch. The model, and an endpoint
behind it, gets the context of the run.
"""

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from scheduler.errors import CHARGED_FAILURES, ErrorCode
from scheduler.payload import add_context, context_in
from scheduler.protocol.batches import ClaimedRequest, Outcome
from scheduler.tracing import Context, Span, SpanRole, Spans, new_span_id

MOST_MEMBERS = 128
"""Sampled members of a batch that are traced; OpenTelemetry allows no more links either."""


class BatchTrace:
    """One batch of this worker, as a context manager. `requests` are the requests to run.

    `began`: its start in monotonic seconds. This base class records nothing: no member is sampled.
    """

    def __init__(self, requests: Sequence[ClaimedRequest], began: float) -> None:
        self.requests = requests
        self.began = began

    def begins(self) -> None:
        """The run begins."""

    def over(self) -> None:
        """The model answered or is lost."""

    def ended(self, outcomes: Sequence[Outcome]) -> None:
        """The outcomes of the members."""

    def lost(self, why: ErrorCode | None) -> None:
        """The batch ended without outcomes; None: it was handed back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """The batch has left this worker."""


class _Member(NamedTuple):
    """A sampled member: the span of its request, and the span of its run."""

    id: str
    request: Context
    run: Context


class Sampled(BatchTrace):
    """A batch with at least one sampled member. `clock` is monotonic seconds."""

    def __init__(
        self,
        spans: Spans,
        requests: Sequence[ClaimedRequest],
        members: Sequence[_Member],
        began: float,
        *,
        attributes: dict[str, str | int | float],
        clock: Callable[[], float],
    ) -> None:
        runs = {member.id: member.run for member in members}
        super().__init__(
            [
                request._replace(body=add_context(request.body, runs[request.id])) if request.id in runs else request
                for request in requests
            ],
            began,
        )
        self._spans = spans
        self._members = members
        self._clock = clock
        self._attributes = attributes
        self._ran: tuple[float, float] | None = None
        self._codes: dict[str, str] = {}
        self._failed = False

    def begins(self) -> None:
        """Start of the run."""
        now = self._clock()
        self._ran = now, now

    def over(self) -> None:
        """End of the run."""
        if self._ran is not None:
            self._ran = self._ran[0], self._clock()

    def ended(self, outcomes: Sequence[Outcome]) -> None:
        """Record error codes."""
        self._codes = {outcome.id: outcome.error_code for outcome in outcomes if outcome.error_code}

    def lost(self, why: ErrorCode | None) -> None:
        """Record the cause. A run that had begun lasted until now."""
        self.over()
        self._failed = why is not None
        self._attributes["tierlane.outcome"] = "handed_back" if why is None else why.value

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
            "batch", batch, first, self.began, self._clock(), self._attributes,
            SpanRole.CONSUMER, links, remote=True, failed=self._failed,
        )  # fmt: skip
        spans = [span]
        if self._ran is not None:
            began, ended = self._ran
            for at, member in enumerate(self._members):
                attributes: dict[str, str | int | float] = {"tierlane.request_id": member.id}
                if code := self._codes.get(member.id):
                    attributes["error.type"] = code
                failed = self._failed or bool(code and code not in CHARGED_FAILURES)
                parent, links = (member.request, [batch]) if at else (batch, [])
                run = Span(
                    "infer", member.run, parent, began, ended, attributes, links=links, remote=bool(at), failed=failed
                )
                spans.append(run)
        self._spans(spans)


class BatchTraces:
    """Creates the traces of one worker. `spans` None: nothing is recorded."""

    def __init__(
        self, spans: Spans | None, worker_id: str, pool: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._spans = spans
        self._worker_id = worker_id
        self._pool = pool
        self._clock = clock

    def of(self, batch_id: str, requests: Sequence[ClaimedRequest], began: float) -> BatchTrace:
        """The trace of a batch that this worker has had since `began`."""
        if self._spans is None or not (members := sampled(requests)):
            return BatchTrace(requests, began)
        attributes: dict[str, str | int | float] = {
            "tierlane.batch_size": len(requests),
            "tierlane.attempt": requests[0].attempt,
            "tierlane.pool": self._pool,
            "tierlane.worker_id": self._worker_id,
        }
        if batch_id:
            attributes["tierlane.batch_id"] = batch_id
        return Sampled(self._spans, requests, members, began, attributes=attributes, clock=self._clock)


def sampled(requests: Sequence[ClaimedRequest]) -> list[_Member]:
    """The sampled members; of several inputs of one list only the first."""
    found: dict[Context, _Member] = {}
    for request in requests:
        context = context_in(request.body)
        if context is not None and context.sampled and context not in found and len(found) < MOST_MEMBERS:
            found[context] = _Member(request.id, context, Context(context.trace_id, new_span_id()))
    return list(found.values())
