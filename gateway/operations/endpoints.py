"""What operators and load balancers ask: `/internal/*` behind the service token, `/livez` and `/readyz` without one."""

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gateway.auth.authenticator import Doorman
from gateway.autoscale import scale_document
from gateway.catalog import CatalogView
from gateway.doors import Doors
from gateway.http.errors import Refusal
from gateway.http.response import Answer
from gateway.http.router import Call
from gateway.operations.health_model import Alive, HealthNow, Readiness
from gateway.pools import Pools
from gateway.snapshots import Snapshots
from gateway.timeline import Story, from_audit, from_redis
from ledger.requests import RequestRow
from scheduler.errors import ErrorCode, RedisUnavailable, RequestError
from scheduler.fault_log import log_fault
from scheduler.request_id import created_ms

FindStored = Callable[[str], Awaitable[RequestRow | None]]
"""From a request id to its row of the audit, or None: `ledger.requests.find_request` on some connection pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InternalParts:
    """What these pages look at."""

    service_token: str
    catalog: CatalogView
    pools: Pools
    doors: Doors
    doorman: Doorman
    snapshots: Snapshots
    find_stored: FindStored | None = None


class Internal:
    """The handlers."""

    def __init__(self, parts: InternalParts) -> None:
        self._parts = parts

    async def livez(self, call: Call) -> Answer:
        """The event loop turns; nothing else is asked."""
        return Answer.of(200, Alive(status="ok"), [("x-request-id", call.request_id)])

    async def readyz(self, call: Call) -> Answer:
        """Whether to send traffic here. Losing Redis later keeps it ready: else it would take every gateway away."""
        missing = self.not_ready()
        body: Readiness = {"status": "not ready", "waiting_for": missing} if missing else {"status": "ready"}
        return Answer.of(503 if missing else 200, body, [("x-request-id", call.request_id)])

    def not_ready(self) -> str | None:
        """What is missing before traffic may come, or None."""
        if self._parts.doors.leaving:
            return "restart"
        if self._parts.catalog.snapshot is None:
            return "catalog"
        return None if self._parts.pools.subscribed else "subscription"

    async def health(self, call: Call) -> Answer:
        """`GET /internal/health`, from the snapshot of this second."""
        self._parts.doorman.check_service(call, self._parts.service_token)
        latest = await self._parts.snapshots.current()
        document: HealthNow = {**latest.health, "age_s": self._parts.snapshots.age_s(latest)}
        return Answer.of(latest.status, document, [("x-request-id", call.request_id), ("Cache-Control", "no-store")])

    async def autoscale(self, call: Call) -> Answer:
        """`GET /internal/autoscale`."""
        self._parts.doorman.check_service(call, self._parts.service_token)
        document = scale_document({parts.config.pool: parts.scale.document() for parts in self._parts.pools.named})
        return Answer.of(200, document, [("x-request-id", call.request_id), ("Cache-Control", "no-store")])

    async def request(self, call: Call) -> Answer:
        """`GET /internal/requests/{id}`: Redis while it still knows the request, the audit afterwards."""
        self._parts.doorman.check_service(call, self._parts.service_token)
        document = await self._document(call.tail)
        if document is None:
            raise RequestError(ErrorCode.NOT_FOUND, "There is no request with this id.")
        return Answer.of(200, document, [("x-request-id", call.request_id), ("Cache-Control", "no-store")])

    async def _document(self, request_id: str) -> Story | None:
        try:
            created_ms(request_id)
        except ValueError:
            return None
        with contextlib.suppress(RedisUnavailable):
            for parts in self._parts.pools.all:
                detail = await parts.results.request_detail(request_id)
                if detail is not None:
                    return from_redis(detail)
        return await self._stored(request_id)

    async def _stored(self, request_id: str) -> Story | None:
        if self._parts.find_stored is None:
            return None
        try:
            row = await self._parts.find_stored(request_id)
        except Exception as error:  # asyncpg has no one base for all that can go wrong on the way.
            log_fault("the audit cannot be read", error)
            raise Refusal(ErrorCode.CATALOG_UNAVAILABLE, "The audit cannot be read right now; try again.") from error
        return None if row is None else from_audit(row)
