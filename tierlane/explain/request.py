"""What happened to one request: rejected by which limit, accepted with its timeline, or not known. Pure."""

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from gateway.operations.endpoints import Event, RequestTimeline, from_audit, from_redis
from ledger.audit.queries import RequestRow
from ratelimit.limits import BUCKETS, REDUCED_OUTCOMES
from ratelimit.quotas import is_metered, key_of, period_of, quota_name, shown_amount, unit_of
from scheduler.errors import HTTP, ErrorCode
from scheduler.protocol.limits import KEEP_MS, RejectionRecord
from scheduler.protocol.pool_view import QueuePlace
from scheduler.protocol.replies import RequestDetail
from scheduler.redis_client.keys import JOBS_GATEWAY
from scheduler.states import TERMINAL, Admission, State
from tierlane.explain.figures import count, moment, number, percent, span

_Words = Callable[[RejectionRecord], str]

_LIMITS: dict[str, _Words] = {
    **dict.fromkeys(REDUCED_OUTCOMES, lambda r: f"the customer's limit over all its keys{_then(r)}"),
    Admission.KEY_LIMIT: lambda r: f"the limit of key {r.key_id}{_then(r)}",
    Admission.CONCURRENCY: lambda r: (
        f"the customer's concurrency: {r.in_use} of {count(r.max_concurrency, 'request')} under way"
    ),
    Admission.QUOTA: lambda r: (
        f"the {'key' if key_of(r.quota) else 'customer'}'s quota of {number(shown_amount(r.quota, r.quota_amount))} {unit_of(r.quota).word} per "
        f"{quota_name(period_of(r.quota))}, which {'had too little left for this request' if is_metered(r.quota) else 'was used up'}"
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
    Admission.TOO_LATE: lambda _: "its deadline: it passed before admission",
    Admission.IN_PROGRESS: lambda _: "its Idempotency-Key: the first request with it was still running",
    Admission.REUSED: lambda _: "its Idempotency-Key: it was used before with another body",
    Admission.ELSEWHERE: lambda _: "the change of the customer's cell: its limits did not arrive in time",
}

_UNASKED: dict[str, str] = {
    ErrorCode.NO_CAPACITY: "no limit: no GPU was healthy",
    ErrorCode.MODEL_TOO_SLOW: "no limit: the model was too slow for the time limit of a batch",
    ErrorCode.BACKPRESSURE: "the memory limit of Redis",
    ErrorCode.QUEUE_FULL: "the gateway's own queue, since more requests arrived than it could submit",
    ErrorCode.DRAINING: "no limit: its gateway was shutting down",
    ErrorCode.ACCOUNT_SUSPENDED: "no limit: the customer was suspended",
    ErrorCode.INVALID_API_KEY: "no limit: its key was revoked or had expired",
}

_ADVICE: dict[str, str] = {
    Admission.KEY_LIMIT: "Send slower with this key, use another one, or raise the key's limit.",
    **{kind.outcome: kind.advice for kind in BUCKETS},
    Admission.CONCURRENCY: "Wait for answers before sending more, or raise the customer's max_concurrency.",
    Admission.QUOTA: "Wait until the quota resets, or raise it; what was used stays counted.",
    Admission.TIER_LIMIT: "Retry later: more GPUs, or less demand of higher tiers, add capacity.",
    Admission.SHED: "Retry later, or use a higher tier; more GPUs drain the queue faster.",
    Admission.WAIT: "Retry later; with a longer max_queue_ms the request would have waited, up to its deadline.",
    Admission.QUEUE_FULL: "Retry later; a tier that is often full needs more GPUs or a larger max_queue_depth.",
    Admission.BACKPRESSURE: "Retry later; if it continues, raise maxmemory of Redis or check which queue does not drain.",
    Admission.TOO_LATE: "Send a new request; if it happens often, Redis or its network stalls.",
    Admission.IN_PROGRESS: "Wait for the first request; its response is then returned again.",
    Admission.REUSED: "Use a new Idempotency-Key for each new body.",
    Admission.ELSEWHERE: "Retry; if it continues, a cell or PostgreSQL does not respond: see /internal/health.",
    ErrorCode.NO_CAPACITY: "Retry when a GPU is healthy again; /internal/health shows why none is.",
    ErrorCode.MODEL_TOO_SLOW: "Raise TIERLANE_GPU_TIMEOUT_MS and TIERLANE_TOTAL_REQUEST_MS, or give the model a faster device.",
    ErrorCode.DRAINING: "Retry: another gateway accepts it.",
    ErrorCode.ACCOUNT_SUSPENDED: "`tierlane customer activate NAME`, once the reason of the suspension is resolved.",
    ErrorCode.INVALID_API_KEY: "Use a valid key: `tierlane key list CUSTOMER` shows its keys, `tierlane key create` makes one.",
}

_ALWAYS = ("customer_id", "key_id", "tier", "code", "outcome", "factor", "remaining", "depth", "retry_after_ms")
"""The figures of a rejection that are shown even if they are 0; others are limits, which may not apply."""

_LOOKED = (
    f"No row of the audit, no request in Redis and no rejection of the last {span(KEEP_MS)} has this id.",
    (
        f"A rejection older than {span(KEEP_MS)}, or one of many in a row, is not kept; the row of an accepted request is kept "
        "until its day is dropped."
    ),
    (
        "What to do: compare the id with x-request-id of the response; a model of another pool needs --pool; "
        "`tierlane explain CUSTOMER` shows a customer's last rejections."
    ),
)
"""Where a request that is not known was searched, and what to do."""


def _then(refusal: RejectionRecord) -> str:
    """Nothing for a record of a version that did not keep it."""
    return f": {refusal.limit} in force, {number(refusal.left)} left" if refusal.limit else ""


def limit_words(refusal: RejectionRecord) -> str:
    """The limit with its values then; the part of a sentence after `rejected by`."""
    if words := _LIMITS.get(refusal.outcome):
        return words(refusal)
    return _UNASKED.get(refusal.code, f"{refusal.code}: {meaning(refusal.code)}")


def lowered_words(refusal: RejectionRecord) -> str | None:
    """The effect of the tier's factor, or None."""
    if refusal.outcome not in REDUCED_OUTCOMES or refusal.factor >= 1:
        return None
    then = f"The limits of tier {refusal.tier} were at {percent(refusal.factor)} of their base"
    if refusal.code == ErrorCode.REDUCED_CAPACITY:
        return f"{then}; its base limit would have accepted the request."
    return f"{then}; its base limit would have rejected it as well."


def advice(refusal: RejectionRecord) -> str:
    """What to do, in at most two sentences."""
    lowered = refusal.code == ErrorCode.REDUCED_CAPACITY and refusal.outcome in REDUCED_OUTCOMES
    known = _ADVICE.get(refusal.outcome) or _ADVICE.get(refusal.code) or "Correct the request before it is sent again."
    said = "The customer did nothing wrong: its limits rise again with more GPUs or less demand." if lowered else known
    if refusal.retry_after_ms > 0:
        return f"{said} The response said to retry after {span(refusal.retry_after_ms)}."
    return said


def meaning(code: str) -> str:
    """The message of an error code, as its client got it."""
    try:
        return HTTP[ErrorCode(code)].message
    except ValueError:
        return "this version does not know the code."


class RequestExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known about one request; `facts` are its values by name."""

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
    *,
    place: QueuePlace | None = None,
) -> RequestExplanation:
    """The audit row has the most, but is written up to seconds late; Redis has what is running now."""
    if row is not None and (detail is None or row.completed_at is not None):
        return _accepted(request_id, from_audit(row), _of_row(row), not_read)
    if detail is not None:
        known = {"customer_id": detail.customer_id, "tier": detail.tier} | (_of_row(row) if row else {})
        if place is not None:
            known |= {"queue": detail.queue} | msgspec.structs.asdict(place)
        return _accepted(request_id, from_redis(detail), known, not_read, place)
    if refusal is not None:
        at, factor = (
            moment(refusal.at_ms),
            f"The limits of tier {refusal.tier} were at {percent(refusal.factor)} of their base.",
        )
        alike = "rejected for the same reason within a quarter of a second"
        words = [
            f"Rejected with {refusal.code} at {at} UTC by {limit_words(refusal)}.",
            lowered_words(refusal) or factor,
            f"{count(refusal.more, 'more request')} of the customer {alike}." if refusal.more else None,
            f"What to do: {advice(refusal)}",
        ]
        noted = msgspec.structs.asdict(refusal)
        facts = {name: value for name, value in noted.items() if name != "id" and (name in _ALWAYS or value)}
        return RequestExplanation(
            request_id=refusal.id,
            found="refused",
            said=[each for each in words if each],
            facts={"at_ms": refusal.at_ms} | facts,
            not_read=not_read,
        )
    said = ["This request is not known.", *_LOOKED] if not not_read else ["It was not found in what could be read."]
    return RequestExplanation(request_id=request_id, found="unknown", said=said, not_read=not_read)


def _accepted(
    request_id: str,
    document: RequestTimeline,
    known: dict[str, Any],
    not_read: list[str],
    place: QueuePlace | None = None,
) -> RequestExplanation:
    said = [_state_words(document)]
    if place is not None:
        where = "the backlog of its customer, behind the tier queue" if place.in_backlog else "the tier queue"
        said.append(f"Position {place.place:,} of {place.of:,} in {where}.")
    if document["status"] in TERMINAL:
        said.append(_delivery_words(document, known))
    return RequestExplanation(
        request_id=request_id,
        found="accepted",
        said=said,
        facts={name: document[name] for name in ("status", "latency_ms", "error", "attempts")} | known,
        timeline=document["timeline"],
        not_read=not_read,
    )


def _state_words(document: RequestTimeline) -> str:
    runs = count(document["attempts"], "run")
    after = "" if document["latency_ms"] is None else f" after {span(document['latency_ms'])}"
    match document["status"]:
        case "queued":
            return f"Accepted; queued, after {runs}."
        case "processing":
            return f"Accepted; in a batch, after {runs} begun."
        case "completed":
            return f"Completed{after} and {runs}."
        case _:
            code = document["error"] or "internal_error"
            return f"Failed with {code}{after} and {runs}: {meaning(code)}"


def _delivery_words(document: RequestTimeline, known: dict[str, Any]) -> str:
    """What is recorded about the response: most ends are recorded by workers, which do not know whether it was sent."""
    if document["error"] == ErrorCode.CANCELLED:
        return "The client had closed the connection or cancelled the job, so no complete response was sent."
    if known.get("gateway_id") == JOBS_GATEWAY:
        return "It was a job: the audit does not record whether the client fetched the result."
    if not known.get("delivered"):
        return (
            "Whether the response reached the client is not recorded; with TIERLANE_REQUEST_LOG=on the gateway's log has a "
            "line for each response."
        )
    if known.get("mode") == "direct" and document["status"] == State.COMPLETED:
        return "The gateway recorded this result and then sent it; whether it reached the client is not recorded."
    return "The gateway recorded this as the response that it sent; whether it reached the client is not recorded."


def _of_row(row: RequestRow) -> dict[str, Any]:
    """What only the audit has, where it is known."""
    names = (
        "customer_id",
        "api_key_id",
        "tier",
        "model",
        "endpoint",
        "http_status",
        "queue_ms",
        "gpu_ms",
        "cost_ms",
        "batch_id",
        "batch_size",
    )
    more = ("worker_id", "gateway_id", "tokens_used", "input_bytes", "output_bytes", "trace_id", "mode", "delivered")
    known = {name: value for name in (*names, *more, "served_from") if (value := getattr(row, name)) is not None}
    if not row.delivered:
        known.pop("delivered", None)  # False does not mean that no response was sent.
    return known
