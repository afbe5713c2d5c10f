"""What became of one request: refused, accepted with its timeline, or not known. Pure: values in, values out."""

from typing import Any, Literal

import msgspec

from gateway.timeline import Event, Story, from_audit, from_redis
from ledger.requests import RequestRow
from scheduler.protocol.limits import KEEP_MS, Refusal
from scheduler.protocol.replies import RequestDetail
from tierlane.explain.figures import count, moment, percent, span
from tierlane.explain.refused import advice, limit_words, lowered_words, meaning, more_words

KEPT = (
    f"Refusals are kept for {span(KEEP_MS)} (of a flood only the first few a customer), accepted requests as rows of the "
    "audit until their day is dropped."
)


class RequestExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """All that could be told of one request; `facts` are its figures by name, for people and programs alike."""

    request_id: str
    found: Literal["refused", "accepted", "unknown"]
    said: list[str]
    facts: dict[str, Any] = {}
    timeline: list[Event] = []
    not_read: list[str] = []


def explain_request(
    request_id: str,
    row: RequestRow | None,
    detail: RequestDetail | None,
    refusal: Refusal | None,
    not_read: list[str],
) -> RequestExplanation:
    """The row of the audit knows most, but comes up to seconds late; Redis knows what runs now."""
    if row is not None and (detail is None or row.completed_at is not None):
        return _accepted(request_id, from_audit(row), _of_row(row), not_read)
    if detail is not None:
        known = {"customer_id": detail.customer_id, "tier": detail.tier} | (_of_row(row) if row else {})
        return _accepted(request_id, from_redis(detail), known, not_read)
    if refusal is not None:
        return _refused(refusal, not_read)
    said = f"{request_id} is not known." if not not_read else f"{request_id} was not found where could be looked."
    return RequestExplanation(request_id=request_id, found="unknown", said=[f"{said} {KEPT}"], not_read=not_read)


def _refused(refusal: Refusal, not_read: list[str]) -> RequestExplanation:
    told = f"Refused with {refusal.code} at {moment(refusal.at_ms)} UTC by {limit_words(refusal)}."
    factor = (
        lowered_words(refusal) or f"Limits of tier {refusal.tier} stood at {percent(refusal.factor)} of their base."
    )
    said = [told, factor, more_words(refusal), f"What to do: {advice(refusal)}"]
    return RequestExplanation(
        request_id=refusal.id,
        found="refused",
        said=[words for words in said if words],
        facts=_figures(refusal),
        not_read=not_read,
    )


def _figures(refusal: Refusal) -> dict[str, Any]:
    """What its gateway noted, without the limits that it did not have."""
    noted = msgspec.structs.asdict(refusal)
    always = ("customer_id", "key_id", "tier", "code", "outcome", "factor", "remaining", "depth", "retry_after_ms")
    return {"at_ms": refusal.at_ms} | {
        name: value for name, value in noted.items() if name != "id" and (name in always or value)
    }


def _accepted(request_id: str, document: Story, known: dict[str, Any], not_read: list[str]) -> RequestExplanation:
    return RequestExplanation(
        request_id=request_id,
        found="accepted",
        said=[_state_words(document)],
        facts={name: document[name] for name in ("status", "latency_ms", "error", "attempts")} | known,
        timeline=document["timeline"],
        not_read=not_read,
    )


def _state_words(document: Story) -> str:
    runs = count(document["attempts"], "run")
    after = "" if document["latency_ms"] is None else f" after {span(document['latency_ms'])}"
    match document["status"]:
        case "queued":
            return f"Accepted; it waits in its queue, after {runs}."
        case "processing":
            return f"Accepted; it is in a batch, after {runs} begun."
        case "completed":
            return f"Completed{after} and {runs}."
        case _:
            code = document["error"] or "internal_error"
            return f"Failed with {code}{after} and {runs}: {meaning(code)}"


def _of_row(row: RequestRow) -> dict[str, Any]:
    """What only the audit knows, where it is known."""
    names = (
        "customer_id",
        "api_key_id",
        "tier",
        "model",
        "http_status",
        "queue_ms",
        "gpu_ms",
        "batch_id",
        "batch_size",
    )
    more = ("worker_id", "gateway_id", "tokens_used", "input_bytes", "output_bytes", "trace_id", "mode", "delivered")
    return {name: value for name in (*names, *more, "served_from") if (value := getattr(row, name)) is not None}
