"""The document of `GET /v1/me`. The form of the response and its OpenAPI description are one type."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from ledger.audit.queries import Usage
from ledger.catalog.snapshot import Identity
from ratelimit.limits import (
    BUCKETS,
    CONCURRENCY,
    LIMIT_COLUMNS,
    MAX_CONCURRENCY,
    REQUEST_BUCKET,
    EffectiveLimits,
    RemainingLimits,
    effective,
)
from ratelimit.quotas import key_of, period_of, quota_name, shown_amount, unit_of

_COLUMN_TYPES: dict[str, type] = {"double": float, "integer": int, "bigint": int}


class QuotaLeft(TypedDict):
    """One quota; null for what is not known yet. `unit`: requests, gpu-s, tokens or usd. `reset_ms` is the time until its window ends.
    `key_id`: the API key whose quota it is, of several that share it the first one; null: the customer's.
    """

    quota: str
    key_id: str | None
    unit: str
    amount: float
    remaining: float | None
    reset_ms: int | None


if TYPE_CHECKING:  # Their members come from the list of limits.
    AgreedLimits = dict[str, float | int | None]
    Remaining = dict[str, Any]
else:
    AgreedLimits = TypedDict(
        "AgreedLimits",
        {
            column.name: _COLUMN_TYPES[column.type]
            if column in (REQUEST_BUCKET.rate, REQUEST_BUCKET.size)
            else _COLUMN_TYPES[column.type] | None
            for column in LIMIT_COLUMNS
        },
    )
    AgreedLimits.__doc__ = "One set of limits; null where there is no such limit."
    Remaining = TypedDict(
        "Remaining",
        {kind.name: int if kind is REQUEST_BUCKET else int | None for kind in BUCKETS}
        | {CONCURRENCY: int | None, "quotas": list[QuotaLeft]},
    )
    Remaining.__doc__ = "What is left now, in whole units; null where there is no such limit."


class LimitsNow(TypedDict):
    """The limits as agreed, as they are in force now, the tier's factor (0..1) between them, and why it is under 1."""

    base: AgreedLimits
    effective: AgreedLimits
    factor: float
    reason: NotRequired[str]


class AccountUsage(TypedDict):
    """The last 24 hours; null, with the problem, where the audit cannot be read."""

    usage: Usage | None
    usage_problem: NotRequired[str]


class Account(AccountUsage):
    """Whom the key belongs to, and where it stands. `gpu_share`: of the GPU time of its tier in the last minute, 0..1; null if
    none was used. `time_zone`: that of its quotas. `weight`: its part of that time while others of the tier wait. `models`:
    those that the key may use; null: all. `max_queue_ms`: the longest wait in the queue; null: that of the model's pool.
    """

    customer: str
    customer_id: str
    tier: str
    time_zone: str
    weight: float
    gpu_share: float | None
    key_id: str
    models: list[str] | None
    limits: LimitsNow
    max_queue_ms: int | None
    remaining: Remaining
    as_of: str


def limits_document(identity: Identity, limits: EffectiveLimits, factor: float) -> LimitsNow:
    """The limits as they were agreed, as they are now, and why they are less where they are."""
    document: LimitsNow = {
        "base": _limits(effective(identity)),
        "effective": _limits(limits),
        "factor": round(factor, 4),
    }
    if factor < 1:
        document["reason"] = (
            f"Tier {identity.tier} has {max(1, round(factor * 100))} % of its limits, because less capacity is available"
            " than is asked for."
        )
    return document


def _limits(limits: EffectiveLimits) -> AgreedLimits:
    """None where there is no such limit; a key with a limit of its own has the smaller of it and its customer's."""
    document: AgreedLimits = {column.name: None for column in LIMIT_COLUMNS}
    document[MAX_CONCURRENCY.name] = limits.max_concurrency or None
    for kind, rate, size in (limits.key_requests, *limits.buckets[1:]):
        document[kind.rate.name] = round(rate, 6) if kind.rate.type == "double" else int(rate)
        if kind.size is not None:
            document[kind.size.name] = round(size, 3)
    return document


def remaining_document(limits: EffectiveLimits, left: RemainingLimits) -> Remaining:
    """What is left of each limit, in whole units; None where there is no such limit, or where it is not known."""
    most = limits.max_concurrency
    document: Remaining = {kind.name: None for kind in BUCKETS}
    for bucket, level in zip((limits.key_requests, *limits.buckets[1:]), left.buckets, strict=True):
        document[bucket.kind.name] = _whole(level.left, bucket.size)
    document[CONCURRENCY] = _whole(most - left.in_use, most) if most else None
    known: Sequence[tuple[int | None, int | None]] = left.quotas
    if len(known) != len(limits.quotas):
        known = [(None, None)] * len(limits.quotas)
    document["quotas"] = [
        {
            "quota": quota_name(period_of(name)),
            "key_id": key_of(name) or None,
            "unit": unit_of(name).word,
            "amount": shown_amount(name, amount),
            "remaining": None if spare is None else shown_amount(name, spare),
            "reset_ms": reset_ms,
        }
        for (name, amount), (spare, reset_ms) in zip(limits.quotas, known, strict=True)
    ]
    return document


def _whole(value: float, limit: float) -> int:
    return max(0, min(int(limit), int(value)))
