"""The end of each customer call, reported once: to the counters, to the SLO, and as a log line.

This runs between a response and its writing, so it only adds, and logs only where TIERLANE_REQUEST_LOG asks for it.
What counts as an SLO failure is the same as in deploy/prometheus/rules.yaml. Fields of the log line are named one by
one; none is an input, an output, a secret or anything else that a client wrote but `model`, a row of the catalog by
then, and the ids of its trace.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import structlog

from gateway.catalog import IdentityView
from gateway.http.errors import RejectionError
from gateway.http.request import HttpRequest
from gateway.inference.pending import PendingRequest
from gateway.limits.demand import DemandMeter
from gateway.metrics.counters import ACCEPTED, COMPLETED, UNKNOWN, Counters
from scheduler.errors import HTTP, ErrorCode, RequestError
from scheduler.protocol.replies import Reply

OUR_FAULT = frozenset(
    {
        ErrorCode.SHED_FOR_PRIORITY,
        ErrorCode.QUEUE_FULL,
        ErrorCode.REDUCED_CAPACITY,
        ErrorCode.NO_CAPACITY,
        ErrorCode.BACKPRESSURE,
        ErrorCode.QUEUE_TIMEOUT,
        ErrorCode.DEADLINE_EXCEEDED,
        ErrorCode.GPU_TIMEOUT,
        ErrorCode.WORKER_LOST,
        ErrorCode.GATEWAY_LOST,
        ErrorCode.ABANDONED,
        ErrorCode.INTERNAL_ERROR,
        ErrorCode.CATALOG_UNAVAILABLE,
        ErrorCode.INVALID_OUTPUT,
        ErrorCode.DRAINING,
    }
)
"""Not the client's input, keys, limits or leaving: those are refused or ended as they should be."""


class EventListener(Protocol):
    """Who is told each call's end, where that was asked for: the log, the traces."""

    def completed(
        self,
        endpoint: str,
        identity: IdentityView,
        pending: PendingRequest,
        replies: Sequence[Reply],
        seconds: float,
        /,
    ) -> None: ...

    def failed(
        self,
        endpoint: str,
        request_id: str,
        identity: IdentityView | None,
        pending: PendingRequest | None,
        error: RequestError,
        /,
    ) -> None: ...

    def accepted(self, endpoint: str, request_id: str, identity: IdentityView, pending: PendingRequest, /) -> None: ...


class EventListeners:
    """Two who are told."""

    def __init__(self, one: EventListener, other: EventListener) -> None:
        self._two = one, other

    def completed(
        self, endpoint: str, identity: IdentityView, pending: PendingRequest, replies: Sequence[Reply], seconds: float
    ) -> None:
        """As `EventListener` says."""
        for each in self._two:
            each.completed(endpoint, identity, pending, replies, seconds)

    def failed(
        self,
        endpoint: str,
        request_id: str,
        identity: IdentityView | None,
        pending: PendingRequest | None,
        error: RequestError,
    ) -> None:
        """As `EventListener` says."""
        for each in self._two:
            each.failed(endpoint, request_id, identity, pending, error)

    def accepted(self, endpoint: str, request_id: str, identity: IdentityView, pending: PendingRequest) -> None:
        """As `EventListener` says."""
        for each in self._two:
            each.accepted(endpoint, request_id, identity, pending)


def told_to(one: EventListener | None, other: EventListener | None) -> EventListener | None:
    """Those of the two that are there, as one: a call's end costs one look, whoever is told."""
    return EventListeners(one, other) if one is not None and other is not None else one or other


class RequestEvents:
    """Of one pool. `endpoint` is the address that was called; `seconds` is since the call arrived."""

    __slots__ = ("_counters", "_demand_meter", "_log", "_pool")

    def __init__(self, counters: Counters, log: EventListener | None, pool: str, demand_meter: DemandMeter) -> None:
        self._counters = counters
        self._demand_meter = demand_meter
        self._log = log
        self._pool = pool

    def completed(
        self,
        endpoint: str,
        identity: IdentityView,
        pending_requests: Sequence[PendingRequest],
        replies: Sequence[Reply],
        seconds: float,
    ) -> None:
        """It was answered with what the model gave."""
        tier, model = identity.tier, pending_requests[0].submission.model
        self._counters.completed(tier, endpoint, seconds)
        for reply in replies:
            self._counters.ran(tier, self._pool, model, reply)
        if self._log is not None:
            self._log.completed(endpoint, identity, pending_requests[0], replies, seconds)

    def failed(
        self,
        endpoint: str,
        request_id: str,
        identity: IdentityView,
        pending: PendingRequest | None,
        error: RequestError,
    ) -> None:
        """It was answered with an error; `pending` where it came so far."""
        self._counters.failed(identity.tier, endpoint, error.code, pending.verdict if pending else None)
        if error.code in OUR_FAULT:
            self._demand_meter.failed(identity.tier)
        if self._log is not None:
            self._log.failed(endpoint, request_id, identity, pending, error)

    def known(
        self, identify: Callable[[HttpRequest], IdentityView], asking: HttpRequest, endpoint: str
    ) -> IdentityView:
        """Who asks for inference. Raises RequestError, which is told as that of nobody."""
        try:
            return identify(asking)
        except RequestError as error:
            self.unknown(endpoint, asking.request_id, error)
            raise

    def unknown(self, endpoint: str, request_id: str, error: Exception) -> None:
        """It was answered with an error before it was known whose it is."""
        if not isinstance(error, RequestError):
            error = RequestError(ErrorCode.INTERNAL_ERROR)
        self._counters.failed(UNKNOWN, endpoint, error.code)
        if self._log is not None:
            self._log.failed(endpoint, request_id, None, None, error)

    def accepted(self, endpoint: str, request_id: str, identity: IdentityView, pending: PendingRequest) -> None:
        """A job was promised."""
        self._counters.ended(identity.tier, endpoint, ACCEPTED)
        if self._log is not None:
            self._log.accepted(endpoint, request_id, identity, pending)

    def left(self, endpoint: str, request_id: str, identity: IdentityView, pending: PendingRequest | None) -> None:
        """Its client did not wait."""
        error = RequestError(ErrorCode.CANCELLED)
        self.failed(endpoint, request_id, identity, pending, error)


_log = structlog.get_logger("request")


class RequestLog:
    """Writes the lines. `clock` is monotonic seconds, as in the waiters."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock

    def completed(
        self, endpoint: str, identity: IdentityView, pending: PendingRequest, replies: Sequence[Reply], seconds: float
    ) -> None:
        """Of a list of inputs the first one's run, and the tokens of all."""
        first = replies[0]
        self._write(
            200,
            COMPLETED,
            **_asked(endpoint, first.id, identity, pending),
            latency_ms=round(seconds * 1000, 2),
            inputs=len(replies),
            tokens_used=sum(reply.tokens_used for reply in replies),
            **_run(first),
        )

    def failed(
        self,
        endpoint: str,
        request_id: str,
        identity: IdentityView | None,
        pending: PendingRequest | None,
        error: RequestError,
    ) -> None:
        """`outcome` is the error's code; `reason` what admission said, where it was admission."""
        verdict = pending.verdict if pending else None
        outcome = pending.outcome if pending else None
        self._write(
            HTTP[error.code].status,
            error.code.value,
            **_asked(endpoint, request_id, identity, pending),
            latency_ms=round((self._clock() - pending.started) * 1000, 2) if pending else None,
            reason=verdict.outcome.value if verdict else None,
            retry_after_ms=error.retry_after_ms if isinstance(error, RejectionError) else None,
            **(_run(outcome) if isinstance(outcome, Reply) else {}),
        )

    def accepted(self, endpoint: str, request_id: str, identity: IdentityView, pending: PendingRequest) -> None:
        """A job: how it ends is in the audit."""
        self._write(202, ACCEPTED, **_asked(endpoint, request_id, identity, pending))

    def _write(self, status: int, outcome: str, **fields: Any) -> None:
        told = {name: value for name, value in fields.items() if value is not None and value != ""}
        _log.info("request", status=status, outcome=outcome, **told)


def _asked(
    endpoint: str, request_id: str, identity: IdentityView | None, pending: PendingRequest | None
) -> dict[str, Any]:
    submission = pending.submission if pending else None
    return {
        "request_id": request_id,
        "endpoint": endpoint,
        "customer_id": identity.customer_id if identity else None,
        "key_id": identity.key_id if identity else None,
        "tier": identity.tier if identity else None,
        "model": submission.model if submission else None,
        "trace_id": submission.trace_id if submission else None,
        "input_bytes": submission.input_bytes if submission else None,
    }


def _run(reply: Reply) -> dict[str, Any]:
    """Where the time went, and who did the work."""
    return {
        "attempt": reply.attempts,
        "queue_wait_ms": round(max(0.0, reply.queue_ms), 2),
        "infer_ms": round(max(0.0, reply.gpu_ms), 2),
        "batch_id": reply.batch_id,
        "batch_size": reply.batch_size,
        "gpu": reply.worker_id,
        "served_from": reply.served_from,
    }
