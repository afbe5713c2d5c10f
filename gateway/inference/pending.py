"""Pending requests, and the registry that maps ids to them.

A request is registered before it is sent to admission, so that no reply can arrive too early. A reply resolves a pending
request only if id, customer and nonce match; all others are dropped and counted, so that no customer can receive the
output of another one.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from scheduler.errors import ErrorCode, RequestError
from scheduler.protocol.admission import Submission, Verdict
from scheduler.protocol.increments import Increment
from scheduler.protocol.replies import Reply
from scheduler.tracing import Context

Outcome = Reply | Verdict | ErrorCode
"""The outcome of a request: the stored reply, admission's rejection, or an error code of the gateway."""

ResponseSink = Callable[[Outcome], None]
"""Receives the outcome, once. Must not raise: it is called in the loops that serve all requests."""


class CustomerMoved(RequestError):
    """The request is to be submitted in another cell: `cell` or, if that is "", the one that its customer has now."""

    def __init__(self, cell: str) -> None:
        super().__init__(ErrorCode.NO_CAPACITY)
        self.cell = cell


class IncrementReader(Protocol):
    """Receives the output of a streamed request while it grows. The methods must not raise."""

    def admitted(self) -> None:
        """Redis has stored the request."""

    def receive(self, increment: Increment) -> None:
        """The output has grown by this increment."""

    @property
    def used(self) -> int:
        """Estimated tokens of the input and of the output delivered so far; 0 while nothing was delivered."""


class RequestTrace:
    """The trace of a sampled request: its own span and its caller's; `entered`: when Redis stored it."""

    __slots__ = ("caller", "context", "entered")

    def __init__(self, context: Context, caller: Context | None) -> None:
        self.context = context
        self.caller = caller
        self.entered: float | None = None  # Monotonic seconds.


class PendingRequest:
    """One request and its outcome. The first outcome is final; `sink` receives it. Times are monotonic seconds."""

    trace: RequestTrace | None = None
    """A class attribute, so that untraced requests have no such slot; TracedRequest has one per instance."""

    __slots__ = (
        "accepted",
        "cancelled",
        "created",
        "deadline",
        "direct",
        "gone",
        "lost",
        "outcome",
        "reader",
        "sent",
        "settled",
        "settling_since",
        "sink",
        "started",
        "streams",
        "submission",
        "together",
        "verdict",
    )

    def __init__(
        self,
        submission: Submission,
        started: float,
        sink: ResponseSink | None = None,
        created: float | None = None,
    ) -> None:
        """`created`: when its id was created, on the clock of `started`; by default at `started`."""
        self.submission = submission
        self.started = started
        self.created = started if created is None else created
        self.deadline = started + submission.total_ms / 1000
        self.sink = sink  # None after its call or the request's removal, since it could form a reference cycle.
        self.outcome: Outcome | None = None
        self.cancelled = False  # The client left before there was an outcome; there will be none.
        self.verdict: Verdict | None = None
        self.sent = False  # Sent to admission, so Redis may have it.
        self.accepted = False  # Redis has confirmed that it stores it.
        self.lost = False  # Redis may have lost it since, and has not confirmed it again.
        self.direct = False  # A worker runs it without Redis, and the audit is written on that path.
        self.settled = False  # Its direct-mode outcome is being written to disk: a reply from Redis no longer counts.
        self.gone = False  # Removed: its response is no longer needed.
        self.reader: IncrementReader | None = None  # Receives increments of the output.
        self.streams = False  # A stream now or before: it may be stopped while it runs if its client has left.
        self.together: Sequence[PendingRequest] = ()
        """All members of its list, itself included; () for a single request."""
        self.settling_since: float | None = None  # When the deadline sweep started to end it.

    @property
    def id(self) -> str:
        """The request id."""
        return self.submission.id

    @property
    def used(self) -> int:
        """Tokens delivered by its stream so far, input included; 0 without a stream."""
        return 0 if self.reader is None else self.reader.used

    @property
    def done(self) -> bool:
        """Whether it has an outcome, or will have none because the client left."""
        return self.outcome is not None or self.cancelled

    @property
    def error_code(self) -> ErrorCode | None:
        """The gateway's own error code, if that is the outcome."""
        outcome = self.outcome
        return outcome if isinstance(outcome, ErrorCode) else None

    def finish(self, outcome: Outcome) -> None:
        """Set the outcome and pass it to the sink. Does nothing if the request is done."""
        if self.outcome is not None or self.cancelled:
            return
        self.outcome = outcome
        sink, self.sink = self.sink, None
        if sink is not None:
            sink(outcome)

    def cancel(self) -> None:
        """The client left: no outcome will be delivered. Does nothing if there is one."""
        self.cancelled = self.outcome is None

    def replace_outcome(self, code: ErrorCode) -> None:
        """The response of its list is this error, so this is the outcome of every member; the sink is not called."""
        self.outcome = code
        self.cancelled = False
        self.sink = None


class PendingRequests:
    """All pending requests in order of arrival. Their deadlines are in any order.

    `ended` is called with each accepted request that is removed, unless a worker ran it in direct mode; `discard_body` with
    the id of each request that is removed.
    """

    def __init__(
        self,
        ended: Callable[[PendingRequest], None] | None = None,
        discard_body: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._waiting: dict[str, PendingRequest] = {}
        self._ended = ended
        self._discard_body = discard_body
        self._none_due_before = math.inf  # No deadline is earlier, on the clock of the requests.
        self.unknown_replies = 0  # Late, or for another gateway.
        self.refused_replies = 0  # Known id, wrong customer or nonce.

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, pending: PendingRequest) -> None:
        """Register a request. To be called before it is sent to admission."""
        self._waiting[pending.id] = pending
        self._none_due_before = min(self._none_due_before, pending.deadline)

    def remove(self, pending: PendingRequest) -> None:
        """Remove a request, whether it is done or not. The caller of `add` must call this in every case."""
        pending.gone = True
        pending.sink = None
        self._waiting.pop(pending.id, None)
        self._discard_body(pending.id)
        if pending.accepted and not pending.direct and self._ended is not None:
            self._ended(pending)

    def resolve(self, reply: Reply) -> bool:
        """Finish the request of this reply. Returns False if the reply was dropped."""
        pending = self._waiting.get(reply.id)
        if pending is None:
            self.unknown_replies += 1
            return False
        submission = pending.submission
        if reply.customer_id != submission.group.customer_id or reply.nonce != submission.nonce:
            self.refused_replies += 1
            return False
        if pending.settled:
            return False
        pending.finish(reply)
        return True

    def resolve_all(self, replies: Iterable[Reply | None]) -> None:
        """Finish the requests of all replies that are not None."""
        for reply in replies:
            if reply is not None:
                self.resolve(reply)

    def receive_all(self, increments: Iterable[Increment]) -> None:
        """Pass increments to the readers of their streams; drop others, since the stored reply has the whole output."""
        for increment in increments:
            pending = self._waiting.get(increment.id)
            if pending is None or pending.reader is None:
                continue
            if increment.nonce != pending.submission.nonce:
                self.refused_replies += 1
                continue
            pending.reader.receive(increment)

    def started_before(self, moment: float) -> list[PendingRequest]:
        """Requests that arrived before `moment` (monotonic seconds), oldest first."""
        found: list[PendingRequest] = []
        for pending in self._waiting.values():
            if pending.started >= moment:
                break
            found.append(pending)
        return found

    def due(self, now: float) -> list[PendingRequest]:
        """Requests whose deadline has passed at `now` (monotonic seconds), oldest first.

        All are looked at only once the earliest deadline that was seen has passed: with thousands that may wait for minutes,
        most calls look at none.
        """
        if now < self._none_due_before:
            return []
        self._none_due_before = min((pending.deadline for pending in self._waiting.values()), default=math.inf)
        return [pending for pending in self._waiting.values() if pending.deadline <= now]

    def all(self) -> list[PendingRequest]:
        """All pending requests, oldest first."""
        return list(self._waiting.values())
