"""Literal limits for tests: limits in force, remaining values, and the base limits of an identity."""

from collections.abc import Mapping, Sequence
from typing import Any

from ledger.catalog.snapshot import Identity
from ratelimit.limits import (
    BUCKETS,
    LIMIT_COLUMNS,
    REQUEST_BUCKET,
    Bucket,
    EffectiveLimits,
    Level,
    RemainingLimits,
    effective,
    values,
)
from scheduler.protocol.admission import Submission, SubmissionGroup

TOKEN_BUCKET = BUCKETS[1]
_NAMES = {
    "rate",
    "burst",
    "tokens_per_minute",
    "max_concurrency",
    "quotas",
    "key_rate",
    "key_burst",
    "weight",
    "key_weight",
    "spread",
    "zone",
}


def in_force(
    rate: float = 1e6,
    burst: float = 1e6,
    *,
    tokens_per_minute: float = 0.0,
    max_concurrency: int = 0,
    quotas: Sequence[tuple[str, int]] = (),
    key_rate: float = 0.0,
    key_burst: float = 0.0,
    weight: float = 1.0,
    key_weight: float = 0.0,
    spread: int = 1,
    zone: str = "",
) -> EffectiveLimits:
    """Limits in force; 0 means that there is no such limit."""
    buckets = [Bucket(REQUEST_BUCKET, rate, burst)]
    if tokens_per_minute:
        buckets.append(Bucket(TOKEN_BUCKET, tokens_per_minute, tokens_per_minute))
    key = Bucket(REQUEST_BUCKET, key_rate, key_burst) if key_rate else None
    return EffectiveLimits(
        tuple(buckets), key, max_concurrency, tuple(quotas), weight, key_weight=key_weight, spread=spread, zone=zone
    )


def submission_of(fields: Mapping[str, Any]) -> Submission:
    """A submission with these fields, those of its group and those that name limits included."""
    limits = in_force(**{name: value for name, value in fields.items() if name in _NAMES})
    common = {name: value for name, value in fields.items() if name in SubmissionGroup.__struct_fields__}
    own = {name: value for name, value in fields.items() if name not in _NAMES and name not in common}
    return Submission(**own, group=SubmissionGroup(**{"limits": limits} | common))


def group_of(identity: Identity, factor: float = 1.0) -> SubmissionGroup:
    """The group of an identity's submissions, with its limits at `factor`."""
    return SubmissionGroup(identity.tier, identity.customer_id, identity.key_id, "tiny", effective(identity, factor))


def remaining(
    requests: float = 0.0,
    reset_ms: int = 0,
    tokens: Level | None = None,
    in_use: int = 0,
    quotas: Sequence[tuple[int, int]] = (),
) -> RemainingLimits:
    """Remaining values; of tokens only if they are limited."""
    return RemainingLimits([Level(requests, reset_ms), *([tokens] if tokens else [])], in_use, quotas)


def with_values(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a tier, a customer or an identity, with the columns of limits put into `limits`."""
    columns = {column.name for column in LIMIT_COLUMNS}
    base = dict(zip((column.name for column in LIMIT_COLUMNS), fields.get("limits", ()), strict=False))
    own = {name: value for name, value in fields.items() if name in columns}
    return {name: value for name, value in fields.items() if name not in columns} | {"limits": values(**base | own)}
