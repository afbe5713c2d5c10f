"""`GET /v1/me`: the customer of the key, its limits now and why, what is left of them, and its last 24 hours.

It spends nothing. Redis and PostgreSQL are read through a bounded cached lookup (one at a time for each name, few in
all, kept for a moment), so that clients cannot overload them; without them the response says what is not known. The
form of the response and its OpenAPI description are one type.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NotRequired, TypedDict, TypeVar

from gateway.auth.authenticator import Authenticator
from gateway.catalog import IdentityView
from gateway.http.response import HttpResponse
from gateway.http.router import RoutedRequest
from gateway.limits.customer_limits import CustomerLimits
from ledger.audit.queries import Usage
from ratelimit.headers import rate_headers
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
from ratelimit.quotas import period_of, quota_name, shown_amount, unit_of
from scheduler.bounded_dict import BoundedDict


class QuotaLeft(TypedDict):
    """One quota; null for what is not known yet. `unit`: requests, gpu-s, tokens or usd. `reset_ms` is the time until its window ends."""

    quota: str
    unit: str
    amount: float
    remaining: float | None
    reset_ms: int | None


_TYPES: dict[str, type] = {"double": float, "integer": int, "bigint": int}

if TYPE_CHECKING:  # Their members come from the list of limits.
    AgreedLimits = dict[str, float | int | None]
    Remaining = dict[str, Any]
else:
    AgreedLimits = TypedDict(
        "AgreedLimits",
        {
            column.name: _TYPES[column.type]
            if column in (REQUEST_BUCKET.rate, REQUEST_BUCKET.size)
            else _TYPES[column.type] | None
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
    none was used. `weight`: its part of that time while others of the tier wait.
    """

    customer: str
    customer_id: str
    tier: str
    weight: float
    gpu_share: float | None
    key_id: str
    limits: LimitsNow
    remaining: Remaining
    as_of: str


MAX_KEPT = 1024

T = TypeVar("T")


class LookupResult(NamedTuple, Generic[T]):
    """The result of a lookup, or the sentence that says why there is none."""

    value: T | None
    problem: str | None = None


class CachedLookup(Generic[T]):
    """Caches lookups by `name`. Times in seconds.

    Results are kept for `keep_s`, failures for `failure_keep_s`; a lookup takes at most `timeout_s`, and `max_running` run
    at a time. `failed` is the message for a failed lookup.
    """

    def __init__(
        self,
        failed: str,
        *,
        keep_s: float,
        failure_keep_s: float,
        timeout_s: float,
        max_running: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._failed = failed
        self._keep_s = keep_s
        self._failure_keep_s = failure_keep_s
        self._timeout_s = timeout_s
        self._max_running = max_running
        self._clock = clock
        self._kept: BoundedDict[str, tuple[float, LookupResult[T]]] = BoundedDict(MAX_KEPT)
        self._running: dict[str, asyncio.Task[LookupResult[T]]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    async def find(self, name: str, look: Callable[[], Awaitable[T]]) -> LookupResult[T]:
        """The kept result of `name`, else that of the running lookup, else that of a new one, if one may start."""
        kept = self._kept.get(name)
        if kept is not None and self._clock() < kept[0]:
            return kept[1]
        task = self._running.get(name)
        if task is None:
            if len(self._running) >= self._max_running:
                return LookupResult(None, "Too many lookups are in progress; try again soon.")
            task = self._running[name] = asyncio.create_task(self._look(name, look), name="look once")
        await asyncio.wait([task])  # Not the task itself: a cancelled caller would cancel it for the others.
        return LookupResult(None, self._failed) if task.cancelled() else task.result()

    async def _look(self, name: str, look: Callable[[], Awaitable[T]]) -> LookupResult[T]:
        try:
            async with asyncio.timeout(self._timeout_s):
                found = LookupResult(await look())
        except Exception:  # noqa: BLE001  # drivers have no one base for all that can go wrong on the way
            found = LookupResult(None, self._failed)
        finally:
            del self._running[name]
        self._keep(name, found)
        return found

    def _keep(self, name: str, found: LookupResult[T]) -> None:
        self._kept.pop(name, None)
        self._kept[name] = (self._clock() + (self._keep_s if found.problem is None else self._failure_keep_s), found)

    async def close(self) -> None:
        """End what is under way."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


LOOK_KEPT_S = 0.02  # Against hot loops only: other gateways spend meanwhile, of which nothing is known here.
USAGE_KEPT_S = 10.0
SORRY_S = 2.0
LOOK_TIMEOUT_S = 0.5
USAGE_TIMEOUT_S = 1.0
USAGE_AT_ONCE = 4
LOOKS_AT_ONCE = 64

NO_USAGE = "The audit cannot be read right now."
FindUsage = Callable[[str], Awaitable[Usage]]
"""From a customer's id to its last 24 hours: `ledger.audit.queries.find_usage` on some connection. Raises what asyncpg raises."""


ReadLimits = Callable[[str, EffectiveLimits, str], Awaitable[RemainingLimits]]
"""`LimitState.read`: what is left, without a charge. Raises RedisUnavailable."""


GpuShareOf = Callable[[IdentityView], float | None]
"""A customer's share of the GPU time of its tier in the last minute, as known here."""


class AccountHome(NamedTuple):
    """The sources of a customer's figures in its cell."""

    customer_limits: CustomerLimits
    read_limits: ReadLimits
    gpu_share: GpuShareOf = lambda _: None


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountParts:
    """What the page looks at; without `find_usage` it says that usage is not known."""

    authenticator: Authenticator
    home: Callable[[IdentityView], AccountHome]
    find_usage: FindUsage | None = None


class AccountEndpoint:
    """The handler."""

    def __init__(self, parts: AccountParts) -> None:
        self._parts = parts
        self._looks: CachedLookup[RemainingLimits] = CachedLookup(
            "Redis is away.",
            keep_s=LOOK_KEPT_S,
            failure_keep_s=SORRY_S,
            timeout_s=LOOK_TIMEOUT_S,
            max_running=LOOKS_AT_ONCE,
        )
        self._usage: CachedLookup[Usage] = CachedLookup(
            NO_USAGE, keep_s=USAGE_KEPT_S, failure_keep_s=SORRY_S, timeout_s=USAGE_TIMEOUT_S, max_running=USAGE_AT_ONCE
        )

    async def __call__(self, call: RoutedRequest) -> HttpResponse:
        """Answer one request. Raises RequestError for who is not known."""
        identity = self._parts.authenticator.identify(call)
        home = self._parts.home(identity)
        limits = home.customer_limits.limits(identity)
        left, exact = await self._left(identity, limits, home)
        document: Account = {
            "customer": identity.customer_name,
            "customer_id": identity.customer_id,
            "tier": identity.tier,
            "weight": identity.weight,
            "gpu_share": home.gpu_share(identity),
            "key_id": identity.key_id,
            "limits": limits_document(identity, limits, home.customer_limits.factor(identity)),
            "remaining": remaining_document(limits, left),
            "as_of": "now" if exact else "estimate",
            **await self._usage_document(identity),
        }
        headers = [("x-request-id", call.request_id), ("Cache-Control", "no-store"), *rate_headers(limits, left)]
        return HttpResponse.of(200, document, headers)

    async def close(self) -> None:
        """End the looks that are under way."""
        await self._looks.close()
        await self._usage.close()

    async def _left(
        self, identity: IdentityView, limits: EffectiveLimits, home: AccountHome
    ) -> tuple[RemainingLimits, bool]:
        """What is left, and whether Redis said so just now: by a look, or by a verdict that came after a look kept."""
        found = await self._looks.find(identity.key_id, lambda: self._read(identity, limits, home))
        return home.customer_limits.left(identity, limits), found.value is not None

    async def _read(self, identity: IdentityView, limits: EffectiveLimits, home: AccountHome) -> RemainingLimits:
        """Read what is left, and note it once: noted again later it would undo what verdicts have reported since."""
        left = await home.read_limits(identity.customer_id, limits, identity.key_id)
        home.customer_limits.looked(identity, limits, left)
        return left

    async def _usage_document(self, identity: IdentityView) -> AccountUsage:
        find = self._parts.find_usage
        customer_id = identity.customer_id
        found: LookupResult[Usage] = LookupResult(None, NO_USAGE)
        if find is not None:
            found = await self._usage.find(customer_id, lambda: find(customer_id))
        if found.problem is not None:
            return {"usage": None, "usage_problem": found.problem}
        return {"usage": found.value}


def limits_document(identity: IdentityView, limits: EffectiveLimits, factor: float) -> LimitsNow:
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
    return document | {"quotas": _quotas(limits, left)}


def _quotas(limits: EffectiveLimits, left: RemainingLimits) -> list[QuotaLeft]:
    known: Sequence[tuple[int | None, int | None]] = left.quotas
    if len(known) != len(limits.quotas):
        known = [(None, None)] * len(limits.quotas)
    return [
        {
            "quota": quota_name(period_of(name)),
            "unit": unit_of(name).word,
            "amount": shown_amount(name, amount),
            "remaining": None if spare is None else shown_amount(name, spare),
            "reset_ms": reset_ms,
        }
        for (name, amount), (spare, reset_ms) in zip(limits.quotas, known, strict=True)
    ]


def _whole(value: float, limit: float) -> int:
    return max(0, min(int(limit), int(value)))
