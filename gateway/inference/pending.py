"""The requests that wait for an answer here: id -> waiter, registered before admission is asked.

A reply resolves a waiter only where id, customer and nonce are those of the waiting request; anything else is dropped
and counted, so that no mix-up below can show one customer another's output.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from scheduler.errors import ErrorCode
from scheduler.protocol.admission import Submission, Verdict
from scheduler.protocol.replies import Increment, Reply
from scheduler.tracing import Context

Outcome = Reply | Verdict | ErrorCode
"""How waiting ends: with the stored reply, with admission's refusal, or with a code of the gateway's own."""


class OutcomeSink(Protocol):
    """What is told the outcome: an asyncio future that somebody awaits, or a ride that answers by itself."""

    def done(self) -> bool: ...

    def cancelled(self) -> bool: ...

    def result(self) -> Outcome: ...

    def set_result(self, outcome: Outcome, /) -> None: ...


class IncrementReader(Protocol):
    """Whoever reads a request's output along. Neither may raise."""

    def admitted(self) -> None:
        """Redis keeps the request."""

    def hear(self, increment: Increment) -> None:
        """Its output has grown."""

    @property
    def used(self) -> int:
        """Tokens that were read and delivered, estimated; 0 while nothing was delivered."""


OUT_OF_ORDER_S = 0.25
"""A request whose body took its time is registered in its turn, but its deadline is a little later than its neighbours'."""


class RequestTrace:
    """The trace of one call that is sampled: its own span, and its caller's. `entered`: when Redis kept it."""

    __slots__ = ("caller", "context", "entered")

    def __init__(self, context: Context, caller: Context | None) -> None:
        self.context = context
        self.caller = caller
        self.entered: float | None = None  # Monotonic seconds.


class PendingRequest:
    """One waiting request. Times are monotonic seconds."""

    trace: RequestTrace | None = None  # Of the class, and so free of cost: only TracedWaiter has one of its own.

    __slots__ = (
        "accepted",
        "deadline",
        "direct",
        "future",
        "gone",
        "lost",
        "reader",
        "sent",
        "settled",
        "settling_since",
        "started",
        "streams",
        "submission",
        "together",
        "verdict",
    )

    def __init__(self, submission: Submission, started: float, future: "asyncio.Future[Outcome] | OutcomeSink") -> None:
        self.submission = submission
        self.started = started
        self.deadline = started + submission.total_ms / 1000
        self.future = future
        self.verdict: Verdict | None = None
        self.sent = False  # Admission was asked, so Redis may know it.
        self.accepted = False  # Redis said that it keeps it.
        self.lost = False  # Redis may have lost it since, and has not said again that it keeps it.
        self.direct = False  # A worker runs it past Redis, and its audit is written there: no witness is needed.
        self.settled = False  # Its end past Redis is on its way to the disk: Redis may not tell another one.
        self.gone = False  # Nobody waits any more.
        self.reader: IncrementReader | None = None  # Whoever reads along now.
        self.streams = False  # Somebody reads along, or did: without a reader nothing is to be run to its end.
        self.together: Sequence[
            PendingRequest
        ] = ()  # Those that enter with it or not at all, itself among them; () for one.
        self.settling_since: float | None = None  # When the deadline sweep took it up.

    @property
    def id(self) -> str:
        return self.submission.id

    @property
    def used(self) -> int:
        """Tokens that whoever reads along was sent, those of the input included; 0 where there is none."""
        return 0 if self.reader is None else self.reader.used

    @property
    def told(self) -> ErrorCode | None:
        """The code that is its answer, where that is one of the gateway's own."""
        future = self.future
        outcome = future.result() if future.done() and not future.cancelled() else None
        return outcome if isinstance(outcome, ErrorCode) else None

    def finish(self, outcome: Outcome) -> None:
        """End the waiting; the first outcome stands."""
        if not self.future.done():
            self.future.set_result(outcome)


class PendingRequests:
    """All waiting requests in the order of their arrival, which is the order of their deadlines.

    `ended` is told of every accepted request that leaves.
    """

    def __init__(self, ended: Callable[[PendingRequest], None] | None = None) -> None:
        self._waiting: dict[str, PendingRequest] = {}
        self._ended = ended
        self.unknown_replies = 0  # Late, or never ours.
        self.refused_replies = 0  # Right id, wrong customer or nonce.

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, pending: PendingRequest) -> None:
        """Register before admission is asked, so that no reply can come too early."""
        self._waiting[pending.id] = pending

    def remove(self, pending: PendingRequest) -> None:
        """Whoever added it removes it, however the waiting ended."""
        pending.gone = True
        self._waiting.pop(pending.id, None)
        if pending.accepted and not pending.direct and self._ended is not None:
            self._ended(pending)

    def resolve(self, reply: Reply) -> bool:
        """Hand a reply to its waiter. False when it was dropped."""
        pending = self._waiting.get(reply.id)
        if pending is None:
            self.unknown_replies += 1
            return False
        if reply.customer_id != pending.submission.customer_id or reply.nonce != pending.submission.nonce:
            self.refused_replies += 1
            return False
        if pending.settled:
            return False
        pending.finish(reply)
        return True

    def resolve_all(self, replies: Iterable[Reply | None]) -> None:
        """Hand over what is there of stored results."""
        for reply in replies:
            if reply is not None:
                self.resolve(reply)

    def hear_all(self, increments: Iterable[Increment]) -> None:
        """Hand increments to those who read along; what nobody here asked for is dropped, since its end tells the same."""
        for increment in increments:
            pending = self._waiting.get(increment.id)
            if pending is None or pending.reader is None:
                continue
            if increment.nonce != pending.submission.nonce:
                self.refused_replies += 1
                continue
            pending.reader.hear(increment)

    def started_before(self, moment: float) -> list[PendingRequest]:
        """Those that have waited since before `moment`, oldest first."""
        found: list[PendingRequest] = []
        for pending in self._waiting.values():
            if pending.started >= moment:
                break
            found.append(pending)
        return found

    def due(self, now: float) -> list[PendingRequest]:
        """Those whose deadline has passed, oldest first."""
        found: list[PendingRequest] = []
        for pending in self._waiting.values():
            if pending.deadline <= now:
                found.append(pending)
            elif pending.deadline > now + OUT_OF_ORDER_S:
                break
        return found

    def all(self) -> list[PendingRequest]:
        """Everyone who waits."""
        return list(self._waiting.values())
