"""The form of `GET /v1/me`: what is written there and what the API's description says, in one place."""

from typing import NotRequired, TypedDict

from ledger.audit.queries import Usage


class AgreedLimits(TypedDict):
    """One set of limits; null where there is no such limit."""

    requests_per_second: float
    burst: float
    tokens_per_minute: int | None
    max_concurrency: int | None


class LimitsNow(TypedDict):
    """The limits as agreed, as they are in force now, the tier's factor (0..1) between them, and why it is under 1."""

    base: AgreedLimits
    effective: AgreedLimits
    factor: float
    reason: NotRequired[str]


class QuotaLeft(TypedDict):
    """One quota; null for what is not known yet. `reset_ms` is the time until its window ends."""

    quota: str
    amount: int
    remaining: int | None
    reset_ms: int | None


class Remaining(TypedDict):
    """What is left now, in whole units; null where there is no such limit."""

    requests: int
    tokens: int | None
    concurrency: int | None
    quotas: list[QuotaLeft]


class AccountUsage(TypedDict):
    """The last 24 hours; null, with the problem, where the audit cannot be read."""

    usage: Usage | None
    usage_problem: NotRequired[str]


class Account(AccountUsage):
    """Whom the key belongs to, and where it stands."""

    customer: str
    customer_id: str
    tier: str
    key_id: str
    limits: LimitsNow
    remaining: Remaining
    as_of: str
