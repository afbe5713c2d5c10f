"""Look-ups of the dashboard: explanations of one customer, and of one request.

A customer has its limits with what is left, its share of the GPU time, its last failed requests and its last rejections.
Nothing is counted for this while requests run: all of it is in the catalog, in Redis or in the audit. A server that is
unavailable is named in `not_read`, and the rest is shown.
"""

import asyncio
from dataclasses import dataclass
from urllib.parse import unquote

import msgspec

from gateway.http.response import HttpResponse
from gateway.http.router import RoutedRequest
from gateway.operations.audited_transaction import AuditedTransaction
from gateway.operations.endpoints import Internal, RequestTimeline
from gateway.operations.session import SessionAuth
from gateway.operations.uncached import uncached
from gateway.pools import Pools
from ledger.alerts import CustomerAlert, customer_alerts
from ledger.audit.queries import FailedRequest, GpuShare, find_failed, find_gpu_share
from ledger.catalog.follower import Catalog
from ledger.catalog.snapshot import Customer, Snapshot
from ratelimit.limit_figures import LimitFigures, limit_figures
from ratelimit.limits import EffectiveLimits, RemainingLimits, effective, value_of
from scheduler.errors import HTTP, ErrorCode, RedisUnavailable, RequestError
from scheduler.protocol.limits import RejectionRecord
from scheduler.request_id import created_ms

NO_REQUEST = "There is no request with this id."
WINDOW_S = 300
MAX_ROWS = 20
MAX_RUNNING = 4
"""Look-ups of customers at a time: each reads Redis and the audit."""


class LimitNow(msgspec.Struct, frozen=True):
    """One limit: as agreed, in force now, and what is left of it. `own`: it is the customer's, not its tier's."""

    limit: str
    own: bool
    base: float
    effective: float
    left: float | None


class RecentRejection(msgspec.Struct, frozen=True):
    """One of the last rejections. `limit`: the limit that rejected it; `more`: equal rejections at the same time."""

    request_id: str
    at_ms: int
    code: str
    limit: str
    factor: float
    more: int


class CustomerExplained(msgspec.Struct, frozen=True, kw_only=True):
    """A customer. `gpu`: of the last `window_s` seconds; null, with a sentence in `not_read`, if it could not be read."""

    id: str
    name: str
    tier: str
    suspended: bool
    factor: float
    limits: list[LimitNow]
    window_s: int
    gpu: GpuShare | None
    failed: list[FailedRequest] | None
    rejections: list[RecentRejection] | None
    alerts: list[CustomerAlert] | None  # Shares of its quotas reached in their present periods.
    messages: dict[str, str]
    not_read: list[str]


class RequestExplained(msgspec.Struct, frozen=True, kw_only=True):
    """A request: its history if it was accepted, else its rejection."""

    id: str
    request: RequestTimeline | None
    rejection: RecentRejection | None
    customer: str
    tier: str
    model: str
    worker: str
    messages: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupParts:
    """The components that the look-ups use."""

    session_auth: SessionAuth
    catalog: Catalog
    pools: Pools
    internal: Internal
    transaction: AuditedTransaction


class Lookups:
    """The handlers."""

    def __init__(self, parts: LookupParts) -> None:
        self._parts = parts
        self._running = asyncio.Semaphore(MAX_RUNNING)

    async def customer(self, call: RoutedRequest) -> HttpResponse:
        """A customer by name or id."""
        self._parts.session_auth.check(call)
        snapshot = self._parts.catalog.snapshot
        if snapshot is None:
            raise RequestError(ErrorCode.CATALOG_UNAVAILABLE)
        row = find_customer(snapshot, unquote(call.tail))
        if row is None:
            raise RequestError(ErrorCode.NOT_FOUND, "There is no customer with this name or id.")
        async with self._running:
            return uncached(call, await self._explained(row, snapshot))

    async def request(self, call: RoutedRequest) -> HttpResponse:
        """A request by its id: from Redis, from the audit, or from the last rejections."""
        self._parts.session_auth.check(call)
        async with self._running:
            return uncached(call, await self._request(unquote(call.tail)))

    async def _explained(self, row: Customer, snapshot: Snapshot) -> CustomerExplained:
        not_read: list[str] = []
        identity = row.identity()
        home = self._parts.pools.home(identity)
        factor = home.limits.factor(row.tier)
        now = effective(identity, factor)
        left: RemainingLimits | None = None
        rejections: list[RejectionRecord] | None = None
        try:
            left = await home.read_limits(row.id, now)
            rejections = await home.recent_rejections(row.id, MAX_ROWS)
        except RedisUnavailable as error:
            not_read.append(f"Redis: what is left of the limits, and rejections ({str(error).rstrip('.')}).")
        gpu, failed, alerts = await self._from_audit(row.id, not_read)
        codes = {each.code for each in rejections or ()} | {each.error_code for each in failed or () if each.error_code}
        return CustomerExplained(
            id=row.id,
            name=row.name,
            tier=row.tier,
            suspended=row.suspended,
            factor=round(factor, 4),
            limits=limits_now(row, snapshot, now, left),
            window_s=WINDOW_S,
            gpu=gpu,
            failed=failed,
            rejections=None if rejections is None else [_rejection(each) for each in rejections],
            alerts=alerts,
            messages=messages(codes),
            not_read=not_read,
        )

    async def _from_audit(
        self, customer_id: str, not_read: list[str]
    ) -> tuple[GpuShare | None, list[FailedRequest] | None, list[CustomerAlert] | None]:
        failed: list[FailedRequest] | None = None
        alerts: list[CustomerAlert] | None = None
        try:
            async with self._parts.transaction.read() as connection:
                alerts = await customer_alerts(connection, customer_id)
                failed = await find_failed(connection, customer_id, MAX_ROWS)
                return await find_gpu_share(connection, customer_id, WINDOW_S), failed, alerts
        except RequestError as error:
            missing = "GPU time and failed requests" if failed is None else "GPU time"
            not_read.append(f"The audit: {missing} ({str(error).rstrip('.')}).")
        return None, failed, alerts  # The query of the GPU time reads more rows, and may reach its time limit alone.

    async def _find_rejection(self, request_id: str) -> RejectionRecord | None:
        """The rejection of a request in any cell. Raises RequestError if none has it, and one of them cannot be read."""
        fault: RedisUnavailable | None = None
        for parts in self._parts.pools.own_cells:
            try:
                if (found := await parts.find_rejection(request_id)) is not None:
                    return found
            except RedisUnavailable as error:
                fault = error
        if fault is not None:
            message = f"Redis is not responding ({str(fault).rstrip('.')}), so rejections cannot be read."
            raise RequestError(ErrorCode.NO_CAPACITY, message) from fault
        return None

    async def _request(self, request_id: str) -> RequestExplained:
        try:
            created_ms(request_id)
        except ValueError:  # All stored rejections would be searched for it.
            raise RequestError(ErrorCode.NOT_FOUND, NO_REQUEST) from None
        timeline, row = await self._parts.internal.find(request_id)
        rejection: RejectionRecord | None = None
        if timeline is None:
            rejection = await self._find_rejection(request_id)
            if rejection is None:
                raise RequestError(ErrorCode.NOT_FOUND, NO_REQUEST)
        snapshot = self._parts.catalog.snapshot
        customer_id = (row.customer_id if row else rejection.customer_id if rejection else "") or ""
        known = snapshot.customers.get(customer_id) if snapshot else None
        code = (timeline["error"] if timeline else rejection.code if rejection else None) or ""
        return RequestExplained(
            id=request_id,
            request=timeline,
            rejection=None if rejection is None else _rejection(rejection),
            customer=known.name if known else customer_id,
            tier=(row.tier if row else rejection.tier if rejection else "") or "",
            model=(row.model if row else "") or "",
            worker=(row.worker_id if row else "") or "",
            messages=messages({code} - {""}),
        )


def find_customer(snapshot: Snapshot, name: str) -> Customer | None:
    """A customer by id, else by name."""
    return snapshot.customers.get(name) or next(
        (each for each in snapshot.customers.values() if each.name == name), None
    )


def messages(codes: set[str]) -> dict[str, str]:
    """The message of each error code of this version."""
    known = {each.value: each for each in ErrorCode}
    return {code: HTTP[known[code]].message for code in sorted(codes) if code in known}


def limits_now(row: Customer, snapshot: Snapshot, now: EffectiveLimits, left: RemainingLimits | None) -> list[LimitNow]:
    """Every limit of a customer; those that it does not have are left out."""
    tier = next((each for each in snapshot.tiers if each.name == row.tier), None)

    def state(limit: LimitFigures) -> LimitNow:
        name, column, base, in_force, rest, _ = limit
        if column is None:
            return LimitNow(name, own=True, base=base or 0.0, effective=in_force or 0.0, left=rest)
        own = tier is not None and value_of(tier.limits, column) != value_of(row.limits, column)
        spare = None if rest is None else round(rest, 1)
        return LimitNow(name, own, round(base or 0.0, 3), round(in_force or 0.0, 3), spare)

    found = limit_figures(effective(row.identity()), now, left)
    return [state(each) for each in found if each.base or each.column is None]


def _rejection(record: RejectionRecord) -> RecentRejection:
    return RecentRejection(
        record.id,
        record.at_ms,
        record.code,
        record.limit or record.quota or record.outcome,
        round(record.factor, 4),
        record.more,
    )
