"""What became of one request (rejected, accepted with its timeline, or not known) and which limit rejected it. Pure."""

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from gateway.operations.endpoints import Event, Story, from_audit, from_redis
from ledger.audit.queries import RequestRow
from ratelimit.headers import quota_name
from ratelimit.limits import BUCKETS, REDUCED_OUTCOMES
from scheduler.errors import HTTP, ErrorCode
from scheduler.protocol.limits import KEEP_MS, RejectionRecord
from scheduler.protocol.replies import RequestDetail
from scheduler.states import Admission
from tierlane.explain.figures import count, moment, number, percent, span

_Words = Callable[[RejectionRecord], str]

_LIMITS: dict[str, _Words] = {
    **{outcome: lambda r: f"{_owner(r)}{_then(r)}" for outcome in REDUCED_OUTCOMES},
    Admission.CONCURRENCY: lambda r: (
        f"the customer's concurrency: {r.in_use} of {count(r.max_concurrency, 'request')} under way"
    ),
    Admission.QUOTA: lambda r: (
        f"the customer's quota of {number(r.quota_amount)} requests per {quota_name(r.quota)}, which was used up"
        if r.quota
        else "a quota of the customer, which was used up"
    ),
    Admission.TIER_LIMIT: lambda r: f"the share of tier {r.tier} in the present capacity, which was used up",
    Admission.SHED: lambda r: f"shedding: {count(r.depth, 'request')} waited in tier {r.tier}",
    Admission.WAIT: lambda r: (
        f"the predicted wait: {count(r.depth, 'request')} waited in tier {r.tier}, and others before it"
    ),
    Admission.QUEUE_FULL: lambda r: f"the queue cap of tier {r.tier}: {count(r.depth, 'request')} waited in it",
    Admission.BACKPRESSURE: lambda _: "the memory limit of Redis",
    Admission.TOO_LATE: lambda _: "its deadline: it had passed before the request could be judged",
    Admission.IN_PROGRESS: lambda _: "its Idempotency-Key: the first request with it was still under way",
    Admission.REUSED: lambda _: "its Idempotency-Key: it was used before with another body",
}

_UNASKED: dict[str, str] = {
    ErrorCode.NO_CAPACITY: "no limit: no healthy GPU was there",
    ErrorCode.BACKPRESSURE: "the memory limit of Redis",
    ErrorCode.QUEUE_FULL: "the gateway's own line, since more came than it could ask admission for",
    ErrorCode.DRAINING: "no limit: its gateway was shutting down",
}

_ADVICE: dict[str, str] = {
    Admission.KEY_LIMIT: "Send slower with this key, use another one, or raise the key's limit.",
    **{kind.outcome: kind.advice for kind in BUCKETS},
    Admission.CONCURRENCY: "Wait for answers before sending more, or raise the customer's max_concurrency.",
    Admission.QUOTA: "Wait until the quota starts anew, or raise it; a raised one keeps what was spent.",
    Admission.TIER_LIMIT: "Try again later: more GPUs, or less demand of the tiers above, make room.",
    Admission.SHED: "Try again later, or serve it in a higher tier; more GPUs drain the queue faster.",
    Admission.WAIT: "Try again later; with a longer max_queue_ms it would have waited, up to its deadline.",
    Admission.QUEUE_FULL: "Try again later; a tier that is often full needs more GPUs or a larger max_queue_depth.",
    Admission.BACKPRESSURE: "Try again later; if it lasts, raise Redis' maxmemory or find out what does not drain.",
    Admission.TOO_LATE: "Send a new request; if it happens often, Redis or its network stalls.",
    Admission.IN_PROGRESS: "Wait for the first request, whose answer is then replayed.",
    Admission.REUSED: "Use a new Idempotency-Key for each new body.",
    ErrorCode.NO_CAPACITY: "Try again when a GPU is back; /internal/health says why none is healthy.",
    ErrorCode.DRAINING: "Send it again: another gateway takes it.",
}


def _owner(refusal: RejectionRecord) -> str:
    if refusal.outcome == Admission.KEY_LIMIT:
        return f"the limit of key {refusal.key_id}"
    return "the customer's limit over all its keys"


def _then(refusal: RejectionRecord) -> str:
    """Nothing for a record of a version that did not keep it."""
    return f": {refusal.limit} in force, {number(refusal.left)} left" if refusal.limit else ""


def limit_words(refusal: RejectionRecord) -> str:
    """What refused it, with its figures then; the part of a sentence after `Refused by`."""
    if words := _LIMITS.get(refusal.outcome):
        return words(refusal)
    return _UNASKED.get(refusal.code, f"{refusal.code}: {meaning(refusal.code)}")


def lowered_words(refusal: RejectionRecord) -> str | None:
    """What the tier's factor had to do with it, or None where nothing."""
    if refusal.outcome not in REDUCED_OUTCOMES or refusal.factor >= 1:
        return None
    then = f"Limits of tier {refusal.tier} stood at {percent(refusal.factor)} of their base then"
    if refusal.code == ErrorCode.REDUCED_CAPACITY:
        return f"{then}; its base limit would have let the request in."
    return f"{then}; its base limit would have refused it as well."


def advice(refusal: RejectionRecord) -> str:
    """What to do, in one or two sentences."""
    lowered = refusal.code == ErrorCode.REDUCED_CAPACITY and refusal.outcome in REDUCED_OUTCOMES
    known = _ADVICE.get(refusal.outcome) or _ADVICE.get(refusal.code) or "Mend the request before it is sent again."
    said = (
        "Nothing is wrong with the customer: its limits come back with more GPUs or less demand." if lowered else known
    )
    if refusal.retry_after_ms > 0:
        return f"{said} Trying again made sense after {span(refusal.retry_after_ms)}."
    return said


def more_words(refusal: RejectionRecord) -> str | None:
    """That it was not alone, or None."""
    if not refusal.more:
        return None
    return f"{count(refusal.more, 'more request')} of the customer met the same within a quarter of a second."


def meaning(code: str) -> str:
    """What an error code means, as its client was told."""
    try:
        return HTTP[ErrorCode(code)].message
    except ValueError:
        return "this version does not know what that means."


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
    refusal: RejectionRecord | None,
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


def _refused(refusal: RejectionRecord, not_read: list[str]) -> RequestExplanation:
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


def _figures(refusal: RejectionRecord) -> dict[str, Any]:
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
