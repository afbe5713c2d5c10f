"""Endpoints for operators and load balancers: `/internal/*` with the service token, `/livez` and `/readyz` without one."""

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypedDict

from gateway.auth.authenticator import Authenticator
from gateway.autoscale import scale_document
from gateway.http.errors import RejectionError
from gateway.http.response import HttpResponse
from gateway.http.router import DrainState, RoutedRequest
from gateway.operations.dashboard.snapshots import DashboardSnapshots
from gateway.operations.health.model import Liveness, Readiness
from gateway.operations.health.pool_state import HealthNow
from gateway.operations.uncached import uncached
from gateway.pools import Pools
from ledger.audit.queries import RequestRow
from ledger.catalog.follower import Catalog
from scheduler.errors import ErrorCode, RedisUnavailable, RequestError
from scheduler.fault_log import log_fault
from scheduler.protocol.replies import RequestDetail
from scheduler.redis_client.keys import DEFAULT_CELL
from scheduler.request_id import created_ms

FindStored = Callable[[str], Awaitable[RequestRow | None]]
"""From a request id to its row of the audit, or None: `ledger.audit.queries.find_request` on some connection pool."""


class Event(TypedDict):
    """An event, its time (RFC 3339), and milliseconds since the request was accepted."""

    event: str
    at: str
    after_ms: int


class RequestTimeline(TypedDict):
    """One request. `latency_ms` is null until it has ended, `error` if there is none."""

    status: str
    latency_ms: float | None
    error: str | None
    attempts: int
    timeline: list[Event]


def from_redis(detail: RequestDetail) -> RequestTimeline:
    """The document of a request that Redis still stores; times are Redis TIME."""
    events = [("accepted", detail.accepted_ms), ("batched", detail.formed_ms), (detail.state, detail.ended_ms)]
    return RequestTimeline(
        status=detail.state,
        latency_ms=None if detail.ended_ms is None else float(detail.ended_ms - detail.accepted_ms),
        error=detail.error_code or None,
        attempts=detail.attempts,
        timeline=[_event(name, at_ms, detail.accepted_ms) for name, at_ms in events if at_ms is not None],
    )


def from_audit(row: RequestRow) -> RequestTimeline:
    """The document of a request in the audit; the time of batching is computed from its queue time."""
    start_ms = _ms(row.created_at)
    events = [_event("accepted", start_ms, start_ms)]
    if row.queue_ms is not None and row.queue_ms >= 0:
        events.append(_event("batched", start_ms + round(row.queue_ms), start_ms))
    if row.completed_at is not None:
        events.append(_event(row.status, _ms(row.completed_at), start_ms))
    return RequestTimeline(
        status=row.status,
        latency_ms=row.latency_ms,
        error=row.error_code or None,
        attempts=row.attempts or 0,
        timeline=events,
    )


def _ms(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


def _event(name: str, at_ms: int, start_ms: int) -> Event:
    at = datetime.fromtimestamp(at_ms / 1000, tz=UTC).isoformat(timespec="milliseconds")
    return {"event": name, "at": at, "after_ms": at_ms - start_ms}


@dataclass(frozen=True, slots=True, kw_only=True)
class InternalParts:
    """The components that the internal endpoints use."""

    service_token: str
    catalog: Catalog
    pools: Pools
    drain_state: DrainState
    authenticator: Authenticator
    snapshots: DashboardSnapshots
    find_stored: FindStored | None = None


class Internal:
    """The handlers of the internal endpoints."""

    def __init__(self, parts: InternalParts) -> None:
        self._parts = parts

    async def livez(self, call: RoutedRequest) -> HttpResponse:
        """`GET /livez`: succeeds while the event loop runs."""
        return HttpResponse.of(200, Liveness(status="ok"), [("x-request-id", call.request_id)])

    async def readyz(self, call: RoutedRequest) -> HttpResponse:
        """`GET /readyz`: whether the gateway accepts traffic.

        A later outage of Redis does not change it, because it would take all gateways out of service. Until Redis has
        responded once, the gateway knows no worker that it could call directly, and is not ready.
        """
        missing = self.not_ready()
        body: Readiness = {"status": "not ready", "waiting_for": missing} if missing else {"status": "ready"}
        return HttpResponse.of(503 if missing else 200, body, [("x-request-id", call.request_id)])

    def not_ready(self) -> str | None:
        """What the gateway is waiting for before it accepts traffic, or None."""
        if self._parts.drain_state.leaving:
            return "restart"
        if self._parts.catalog.snapshot is None:
            return "catalog"
        return None if self._parts.pools.subscribed else self._parts.pools.redis_problem or "subscription"

    async def health(self, call: RoutedRequest) -> HttpResponse:
        """`GET /internal/health`, from the current snapshot."""
        self._parts.authenticator.check_service(call, self._parts.service_token)
        latest = await self._parts.snapshots.current()
        document: HealthNow = {**latest.health, "age_s": self._parts.snapshots.age_s(latest)}
        return uncached(call, document, 503 if document["status"] == "down" else 200)

    async def autoscale(self, call: RoutedRequest) -> HttpResponse:
        """`GET /internal/autoscale`."""
        self._parts.authenticator.check_service(call, self._parts.service_token)
        document = scale_document(
            {
                parts.config.place: parts.scale.document()
                for parts in self._parts.pools.named
                if parts.config.cell == DEFAULT_CELL
            }
        )
        return uncached(call, document)

    async def request(self, call: RoutedRequest) -> HttpResponse:
        """`GET /internal/requests/{id}`: from Redis while it stores the request, then from the audit."""
        self._parts.authenticator.check_service(call, self._parts.service_token)
        document, _ = await self.find(call.tail)
        if document is None:
            raise RequestError(ErrorCode.NOT_FOUND, "There is no request with this id.")
        return uncached(call, document)

    async def find(self, request_id: str) -> tuple[RequestTimeline | None, RequestRow | None]:
        """The document of a request, and its row if the audit has one. Raises RequestError if the audit cannot be read."""
        try:
            created_ms(request_id)
        except ValueError:
            return None, None
        for parts in self._parts.pools.all:
            with contextlib.suppress(RedisUnavailable):
                detail = await parts.results.request_detail(request_id)
                if detail is not None:
                    return from_redis(detail), None
        if self._parts.find_stored is None:
            return None, None
        try:
            row = await self._parts.find_stored(request_id)
        except Exception as error:  # asyncpg has no common base class of its errors.
            log_fault("reading the audit failed", error)
            raise RejectionError(ErrorCode.CATALOG_UNAVAILABLE, "The audit cannot be read now; try again.") from error
        return None if row is None else from_audit(row), row
