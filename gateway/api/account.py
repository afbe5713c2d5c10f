"""`GET /v1/me`: the customer of the key, its limits now and why, what is left of them, and its last 24 hours.

It spends nothing. Redis and PostgreSQL are read through a bounded cached lookup (one at a time for each name, few in
all, kept for a moment), so that clients cannot overload them; without them the response says what is not known.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

from gateway.api.account_document import Account, limits_document, remaining_document
from gateway.api.cached_lookup import CachedLookup, LookupResult
from gateway.auth.authenticator import Authenticator
from gateway.http.response import HttpResponse
from gateway.http.router import RoutedRequest
from gateway.limits.customer_limits import CustomerLimits
from ledger.audit.queries import Usage
from ledger.catalog.snapshot import Identity
from ratelimit.headers import rate_headers
from ratelimit.limits import EffectiveLimits, RemainingLimits

LOOK_KEPT_S = 0.02  # Against hot loops only: other gateways spend meanwhile, of which nothing is known here.
USAGE_KEPT_S = 10.0
LOOK_TIMEOUT_S = 0.5
USAGE_TIMEOUT_S = 1.0
USAGE_AT_ONCE = 4
LOOKS_AT_ONCE = 64

NO_USAGE = "The audit cannot be read right now."
FindUsage = Callable[[str], Awaitable[Usage]]
"""From a customer's id to its last 24 hours: `ledger.audit.queries.find_usage` on some connection. Raises what asyncpg raises."""

ReadLimits = Callable[[str, EffectiveLimits, str], Awaitable[RemainingLimits]]
"""`LimitState.read`: what is left, without a charge. Raises RedisUnavailable."""

GpuShareOf = Callable[[Identity], float | None]
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
    home: Callable[[Identity], AccountHome]
    find_usage: FindUsage | None = None


class AccountEndpoint:
    """The handler."""

    def __init__(self, parts: AccountParts) -> None:
        self._parts = parts
        self._looks: CachedLookup[RemainingLimits] = CachedLookup(
            "Redis is away.",
            keep_s=LOOK_KEPT_S,
            timeout_s=LOOK_TIMEOUT_S,
            max_running=LOOKS_AT_ONCE,
        )
        self._usage: CachedLookup[Usage] = CachedLookup(
            NO_USAGE,
            keep_s=USAGE_KEPT_S,
            timeout_s=USAGE_TIMEOUT_S,
            max_running=USAGE_AT_ONCE,
        )

    async def __call__(self, call: RoutedRequest) -> HttpResponse:
        """Answer one request. Raises RequestError for who is not known."""
        identity = self._parts.authenticator.identify(call)
        home = self._parts.home(identity)
        limits = home.customer_limits.limits(identity)
        # Exact, if Redis reported it just now: in this lookup, or in a verdict after a lookup that is kept.
        exact = (await self._looks.find(identity.key_id, lambda: self._read(identity, limits, home))).value is not None
        left = home.customer_limits.left(identity, limits)
        usage: LookupResult[Usage] = LookupResult(None, NO_USAGE)
        find = self._parts.find_usage
        if find is not None:
            usage = await self._usage.find(identity.customer_id, lambda: find(identity.customer_id))
        document: Account = {
            "customer": identity.customer_name,
            "customer_id": identity.customer_id,
            "tier": identity.tier,
            "time_zone": identity.zone or "UTC",
            "weight": identity.weight,
            "gpu_share": home.gpu_share(identity),
            "key_id": identity.key_id,
            "models": None if identity.models is None else list(identity.models),
            "limits": limits_document(identity, limits, home.customer_limits.factor(identity)),
            "max_queue_ms": identity.max_queue_ms,
            "remaining": remaining_document(limits, left),
            "as_of": "now" if exact else "estimate",
            "usage": usage.value,
        }
        if usage.problem is not None:
            document["usage_problem"] = usage.problem
        headers = [("x-request-id", call.request_id), ("Cache-Control", "no-store"), *rate_headers(limits, left)]
        return HttpResponse.of(200, document, headers)

    async def close(self) -> None:
        """End the looks that are under way."""
        await self._looks.close()
        await self._usage.close()

    async def _read(self, identity: Identity, limits: EffectiveLimits, home: AccountHome) -> RemainingLimits:
        """Read what is left, and note it once: noted again later it would undo what verdicts have reported since."""
        left = await home.read_limits(identity.customer_id, limits, identity.key_id)
        home.customer_limits.looked(identity, limits, left)
        return left
