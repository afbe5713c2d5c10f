"""One line for each call of a customer, where TIERLANE_REQUEST_LOG asks for it: who, what, how it ended, where time went.

Fields are named one by one and none of them is an input, an output, a key's secret or anything else that a client wrote
but `model`, which is a row of the catalog by then, and the ids of its trace.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from gateway.catalog import IdentityView
from gateway.http.errors import Refusal
from gateway.inference.pending import Waiter
from gateway.metrics.counters import ACCEPTED, COMPLETED
from scheduler.errors import HTTP, RequestError
from scheduler.protocol.replies import Reply

_log = structlog.get_logger("request")


class RequestLog:
    """Writes the lines. `clock` is monotonic seconds, as in the waiters."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock

    def completed(
        self, endpoint: str, identity: IdentityView, waiter: Waiter, replies: Sequence[Reply], seconds: float
    ) -> None:
        """Of a list of inputs the first one's run, and the tokens of all."""
        first = replies[0]
        self._write(
            200,
            COMPLETED,
            **_asked(endpoint, first.id, identity, waiter),
            latency_ms=round(seconds * 1000, 2),
            inputs=len(replies),
            tokens_used=sum(reply.tokens_used for reply in replies),
            **_run(first),
        )

    def failed(
        self, endpoint: str, request_id: str, identity: IdentityView | None, waiter: Waiter | None, error: RequestError
    ) -> None:
        """`outcome` is the error's code; `reason` what admission said, where it was admission."""
        verdict = waiter.verdict if waiter else None
        outcome = waiter.future.result() if waiter and waiter.future.done() and not waiter.future.cancelled() else None
        self._write(
            HTTP[error.code].status,
            error.code.value,
            **_asked(endpoint, request_id, identity, waiter),
            latency_ms=round((self._clock() - waiter.started) * 1000, 2) if waiter else None,
            reason=verdict.outcome.value if verdict else None,
            retry_after_ms=error.retry_after_ms if isinstance(error, Refusal) else None,
            **(_run(outcome) if isinstance(outcome, Reply) else {}),
        )

    def accepted(self, endpoint: str, request_id: str, identity: IdentityView, waiter: Waiter) -> None:
        """A job: how it ends is in the audit."""
        self._write(202, ACCEPTED, **_asked(endpoint, request_id, identity, waiter))

    def _write(self, status: int, outcome: str, **fields: Any) -> None:
        told = {name: value for name, value in fields.items() if value is not None and value != ""}
        _log.info("request", status=status, outcome=outcome, **told)


def _asked(endpoint: str, request_id: str, identity: IdentityView | None, waiter: Waiter | None) -> dict[str, Any]:
    submission = waiter.submission if waiter else None
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
