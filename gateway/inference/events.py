"""The result of each customer call, recorded once: in the counters, as SLO failure, and as a log line.

This runs between building a response and writing it, so it only counts, and logs only if TIERLANE_REQUEST_LOG is set.
The definition of an SLO failure is that of deploy/prometheus/rules.yaml. The log line has a fixed list of fields. None
contains an input, an output, a secret or other text of the client, except `model` (by then a row of the catalog) and
the trace id.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import structlog

from gateway.http.errors import RejectionError
from gateway.http.request import HttpRequest
from gateway.inference.pending import PendingRequest
from gateway.limits.auxiliary import AuxiliaryLimitReached
from gateway.limits.demand import DemandMeter
from gateway.metrics.counters import ACCEPTED, COMPLETED, UNKNOWN, Counters
from ledger.catalog.api_key import KnownCallerError
from ledger.catalog.snapshot import Identity
from scheduler.errors import HTTP, REFUSED, ErrorCode, RequestError
from scheduler.protocol.replies import Reply

SLO_FAILURES = frozenset(
    {
        ErrorCode.SHED_FOR_PRIORITY,
        ErrorCode.QUEUE_FULL,
        ErrorCode.REDUCED_CAPACITY,
        ErrorCode.NO_CAPACITY,
        ErrorCode.BACKPRESSURE,
        ErrorCode.QUEUE_TIMEOUT,
        ErrorCode.DEADLINE_EXCEEDED,
        ErrorCode.GPU_TIMEOUT,
        ErrorCode.MODEL_TOO_SLOW,
        ErrorCode.WORKER_LOST,
        ErrorCode.GATEWAY_LOST,
        ErrorCode.ABANDONED,
        ErrorCode.INTERNAL_ERROR,
        ErrorCode.CATALOG_UNAVAILABLE,
        ErrorCode.INVALID_OUTPUT,
        ErrorCode.DRAINING,
    }
)
"""Errors that are not caused by the client's input, keys, limits or disconnection."""

RUN_FAILURES = frozenset({ErrorCode.WORKER_LOST, ErrorCode.GPU_TIMEOUT, ErrorCode.INVALID_OUTPUT})
"""Failures of a run, which its input may have caused."""

RecordRejectedCaller = Callable[[str, str, Identity, RequestError], None]
"""Called for each request of a known customer that is rejected by its key: endpoint, request id, identity, error."""

_log = structlog.get_logger("request")


class EventListener(Protocol):
    """Receives the result of each call: the request log and the traces, if they are enabled."""

    def completed(
        self,
        endpoint: str,
        identity: Identity,
        pending: PendingRequest,
        replies: Sequence[Reply],
        seconds: float,
        /,
    ) -> None: ...

    def failed(
        self,
        endpoint: str,
        request_id: str,
        identity: Identity | None,
        pending: PendingRequest | None,
        error: RequestError,
        /,
    ) -> None: ...

    def accepted(self, endpoint: str, request_id: str, identity: Identity, pending: PendingRequest, /) -> None: ...


class EventListeners:
    """Two listeners as one."""

    def __init__(self, one: EventListener, other: EventListener) -> None:
        self._two = one, other

    def completed(
        self, endpoint: str, identity: Identity, pending: PendingRequest, replies: Sequence[Reply], seconds: float
    ) -> None:
        """As in EventListener."""
        for each in self._two:
            each.completed(endpoint, identity, pending, replies, seconds)

    def failed(
        self,
        endpoint: str,
        request_id: str,
        identity: Identity | None,
        pending: PendingRequest | None,
        error: RequestError,
    ) -> None:
        """As in EventListener."""
        for each in self._two:
            each.failed(endpoint, request_id, identity, pending, error)

    def accepted(self, endpoint: str, request_id: str, identity: Identity, pending: PendingRequest) -> None:
        """As in EventListener."""
        for each in self._two:
            each.accepted(endpoint, request_id, identity, pending)


def combined_listener(one: EventListener | None, other: EventListener | None) -> EventListener | None:
    """The listeners that are not None, as one; None if both are."""
    return EventListeners(one, other) if one is not None and other is not None else one or other


class RequestEvents:
    """Records the results of calls of one pool. `endpoint`: the path that was called; `seconds`: since the call arrived."""

    __slots__ = ("_counters", "_demand_meter", "_log", "_pool", "_record_rejected_caller")

    def __init__(
        self,
        counters: Counters,
        log: EventListener | None,
        pool: str,
        demand_meter: DemandMeter,
        record_rejected_caller: RecordRejectedCaller = lambda *_: None,
    ) -> None:
        self._record_rejected_caller = record_rejected_caller
        self._counters = counters
        self._demand_meter = demand_meter
        self._log = log
        self._pool = pool

    def completed(
        self,
        endpoint: str,
        identity: Identity,
        pending_requests: Sequence[PendingRequest],
        replies: Sequence[Reply],
        seconds: float,
    ) -> None:
        """The response contained the model's output."""
        tier, meter = identity.tier, self._demand_meter
        meter.outcomes.completed(tier)
        meter.refusals.served(identity.customer_id)
        self._counters.completed(tier, endpoint, seconds)
        for pending, reply in zip(pending_requests, replies, strict=True):
            submission = pending.submission
            if reply.id == submission.id:  # Else the stored reply of an Idempotency-Key.
                self._counters.ran(tier, endpoint, self._pool, submission.model, reply)
                meter.gpu_time.ran(identity, reply)
        if self._log is not None:
            self._log.completed(endpoint, identity, pending_requests[0], replies, seconds)

    def streamed(
        self,
        endpoint: str,
        identity: Identity,
        pending: PendingRequest,
        reply: Reply,
        *,
        first_s: float,
        seconds: float,
    ) -> None:
        """As `completed`, of a stream whose first text was sent `first_s` after the call arrived."""
        if reply.id == pending.id:
            self._counters.streamed(
                identity.tier, endpoint, pending.submission.model, reply, first_s=first_s, seconds=seconds
            )
        self.completed(endpoint, identity, (pending,), (reply,), seconds)

    def failed(
        self,
        endpoint: str,
        request_id: str,
        identity: Identity,
        pending: PendingRequest | None,
        error: RequestError,
    ) -> None:
        """The response was an error; `pending` if a pending request was built."""
        self._counters.failed(identity.tier, endpoint, error.code, pending.verdict if pending else None)
        if error.code in SLO_FAILURES:
            self._demand_meter.failed(identity.tier)
            self._demand_meter.outcomes.failed(identity.tier, error.code)
            self._demand_meter.gpu_time.unmet(identity)
            if error.code in RUN_FAILURES:
                self._demand_meter.refusals.failed(identity.customer_id, identity.customer_name)
        else:
            self._demand_meter.outcomes.refused(identity.tier, error.code)
            if error.code in REFUSED and pending is not None and pending.sent:
                # For the ratios of failures it is an answer.
                self._demand_meter.outcomes.completed(identity.tier)
                self._demand_meter.refusals.refused(identity.customer_id)
        if self._log is not None:
            self._log.failed(endpoint, request_id, identity, pending, error)

    def known(self, identify: Callable[[HttpRequest], Identity], request: HttpRequest, endpoint: str) -> Identity:
        """The identity of the caller. Records a failed authentication, or too many requests, and raises it as RequestError."""
        try:
            return identify(request)
        except RequestError as error:
            self.unknown(endpoint, request.request_id, error)
            raise

    def unknown(self, endpoint: str, request_id: str, error: Exception) -> None:
        """The response was an error before the caller was authenticated. It counts for its customer, if that is known."""
        if isinstance(error, KnownCallerError | AuxiliaryLimitReached):
            self.failed(endpoint, request_id, error.identity, None, error)
            if isinstance(error, KnownCallerError):
                self._record_rejected_caller(endpoint, request_id, error.identity, error)
            return
        if not isinstance(error, RequestError):
            error = RequestError(ErrorCode.INTERNAL_ERROR)
        self._counters.failed(UNKNOWN, endpoint, error.code)
        if self._log is not None:
            self._log.failed(endpoint, request_id, None, None, error)

    def answered(self, endpoint: str, identity: Identity) -> None:
        """The response needed no model."""
        self._counters.ended(identity.tier, endpoint, COMPLETED)

    def accepted(self, endpoint: str, request_id: str, identity: Identity, pending: PendingRequest) -> None:
        """The response was the 202 of a job."""
        self._counters.ended(identity.tier, endpoint, ACCEPTED)
        if self._log is not None:
            self._log.accepted(endpoint, request_id, identity, pending)

    def left(self, endpoint: str, request_id: str, identity: Identity, pending: PendingRequest | None) -> None:
        """The client left before the response."""
        error = RequestError(ErrorCode.CANCELLED)
        self.failed(endpoint, request_id, identity, pending, error)


class RequestLog:
    """Writes one log line per call. `clock`: monotonic seconds, as in pending requests."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock

    def completed(
        self, endpoint: str, identity: Identity, pending: PendingRequest, replies: Sequence[Reply], seconds: float
    ) -> None:
        """Logs the run of the first input, and the tokens of all."""
        first = replies[0]
        self._write(
            200,
            COMPLETED,
            **_request_fields(endpoint, first.id, identity, pending),
            latency_ms=round(seconds * 1000, 2),
            inputs=len(replies),
            tokens_used=sum(reply.tokens_used for reply in replies),
            **_run_fields(first),
        )

    def failed(
        self,
        endpoint: str,
        request_id: str,
        identity: Identity | None,
        pending: PendingRequest | None,
        error: RequestError,
    ) -> None:
        """Logs the error code as `outcome`, and the verdict of admission, if there is one, as `reason`."""
        verdict = pending.verdict if pending else None
        outcome = pending.outcome if pending else None
        self._write(
            HTTP[error.code].status,
            error.code.value,
            **_request_fields(endpoint, request_id, identity, pending),
            latency_ms=round((self._clock() - pending.started) * 1000, 2) if pending else None,
            reason=verdict.outcome.value if verdict else None,
            retry_after_ms=error.retry_after_ms if isinstance(error, RejectionError) else None,
            **(_run_fields(outcome) if isinstance(outcome, Reply) else {}),
        )

    def accepted(self, endpoint: str, request_id: str, identity: Identity, pending: PendingRequest) -> None:
        """Logs a job; its result is in the audit."""
        self._write(202, ACCEPTED, **_request_fields(endpoint, request_id, identity, pending))

    def _write(self, status: int, outcome: str, **fields: Any) -> None:
        present = {name: value for name, value in fields.items() if value is not None and value != ""}
        _log.info("request", status=status, outcome=outcome, **present)


def _request_fields(
    endpoint: str, request_id: str, identity: Identity | None, pending: PendingRequest | None
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


def _run_fields(reply: Reply) -> dict[str, Any]:
    """Durations of the run, its batch and its worker."""
    return {
        "attempt": reply.attempts,
        "queue_wait_ms": round(max(0.0, reply.queue_ms), 2),
        "infer_ms": round(max(0.0, reply.gpu_ms), 2),
        "batch_id": reply.batch_id,
        "batch_size": reply.batch_size,
        "gpu": reply.worker_id,
        "served_from": reply.served_from,
    }
