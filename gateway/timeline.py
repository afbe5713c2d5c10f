"""One request's story for operators: status, time taken, error, attempts, and what happened when."""

from datetime import UTC, datetime
from typing import TypedDict

from ledger.requests import RequestRow
from scheduler.protocol.replies import RequestDetail


class Event(TypedDict):
    """What happened, when (RFC 3339), and how long after the request was accepted."""

    event: str
    at: str
    after_ms: int


class Story(TypedDict):
    """The request so far; `latency_ms` is null while it is open, `error` where there is none."""

    status: str
    latency_ms: float | None
    error: str | None
    attempts: int
    timeline: list[Event]


def from_redis(detail: RequestDetail) -> Story:
    """The document of a request that Redis still knows; times are Redis TIME."""
    events = [("accepted", detail.accepted_ms), ("batched", detail.formed_ms), (detail.state, detail.ended_ms)]
    return _document(
        detail.state,
        None if detail.ended_ms is None else float(detail.ended_ms - detail.accepted_ms),
        detail.error_code,
        detail.attempts,
        [_event(name, at_ms, detail.accepted_ms) for name, at_ms in events if at_ms is not None],
    )


def from_audit(row: RequestRow) -> Story:
    """The document of a request out of the audit; the moment of batching is known from the wait before it."""
    start_ms = _ms(row.created_at)
    events = [_event("accepted", start_ms, start_ms)]
    if row.queue_ms is not None and row.queue_ms >= 0:
        events.append(_event("batched", start_ms + round(row.queue_ms), start_ms))
    if row.completed_at is not None:
        events.append(_event(row.status, _ms(row.completed_at), start_ms))
    return _document(row.status, row.latency_ms, row.error_code, row.attempts or 0, events)


def _document(status: str, latency_ms: float | None, error: str | None, attempts: int, timeline: list[Event]) -> Story:
    return {
        "status": status,
        "latency_ms": latency_ms,
        "error": error or None,
        "attempts": attempts,
        "timeline": timeline,
    }


def _ms(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


def _event(name: str, at_ms: int, start_ms: int) -> Event:
    at = datetime.fromtimestamp(at_ms / 1000, tz=UTC).isoformat(timespec="milliseconds")
    return {"event": name, "at": at, "after_ms": at_ms - start_ms}
