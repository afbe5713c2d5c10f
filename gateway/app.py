"""The life of a gateway process: start, readiness, drain, stop."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from gateway.alerts.service import QuotaAlerts
from gateway.api.account import FindUsage
from gateway.auth.authenticator import TokenLookup
from gateway.config import GatewayConfig
from gateway.http.listening import ListeningPort
from gateway.http.server import EdgeServer, check_parser, serve
from gateway.inference.traces import RequestTraces
from gateway.operations.audited_transaction import Connect
from gateway.operations.endpoints import FindStored
from gateway.standby_scheduler import Schedule
from gateway.wiring import GatewayParts
from ledger.catalog.follower import Catalog
from scheduler.errors import ErrorCode, RedisUnavailable
from scheduler.redis_client.connections import check_server
from scheduler.redis_client.distance import too_far
from scheduler.tasks import end_all

if TYPE_CHECKING:
    from gateway.grpc.server import GrpcServer

log = structlog.get_logger("gateway")

POLL_S = 0.02
LAST_CANCELLATIONS_S = 0.5
KEPT_S = 6.0  # Load balancers keep idle connections for 5 s (deploy/proxies), and may send a request on one until then.
LAST_REQUESTS_S = 0.5  # For requests on connections that were opened just before the port was closed.
REPORT_EVERY_S = 10.0  # Between two log lines about what a drain waits for.
LAST_RESPONSES_S = 0.5  # For handlers that are still running when the gateway stops.
GRPC_LINGER_S = 0.1  # For the status of calls that have just ended.
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Gateway(GatewayParts):
    """One gateway process. `start` listens, `drain` completes accepted requests, `stop` ends it."""

    def __init__(
        self,
        config: GatewayConfig,
        catalog: Catalog,
        find_stored: FindStored | None = None,
        find_usage: FindUsage | None = None,
        tokens: TokenLookup | None = None,
        *,
        connect: Connect | None = None,
        traces: RequestTraces | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__(
            config, catalog, find_stored, find_usage, tokens, connect=connect, traces=traces, schedule=schedule
        )
        self.alerts = QuotaAlerts(config.jobs, catalog, self._shared.quota_uses, self._shared.counters)
        self._tasks: list[asyncio.Task[None]] = []
        self._edge: EdgeServer | None = None
        self._grpc: GrpcServer | None = None
        self._hurried = False  # The drain ends at once.
        self._port: ListeningPort | None = None
        self._leaving: asyncio.Task[None] | None = None  # The end of gRPC calls while draining.
        self.port = config.port
        self.grpc_port = 0  # Once it is served.

    async def start(self) -> None:
        """Send heartbeats, subscribe and listen. Raises StartError for an unusable server or port.

        Redis may be unavailable: until it responds, requests are rejected and `/readyz` reports not ready.
        """
        check_parser()
        self._shared.body_store.open()
        try:
            if problem := too_far(await check_server(self._client)):
                log.warning("Redis is too far away", reason=problem)
        except RedisUnavailable as error:
            log.warning("starting without Redis", reason=str(error))
        self.direct.open()
        await self.heartbeat.heartbeat()
        edge = self._edge = EdgeServer(
            self._routes, self._shared.faults, self.drain_state, self.config, self._fast_path
        )
        loops = {
            "edge": edge.sweep_forever,
            "pools": self.pool_lifecycle.run,
            "snapshots": self.snapshots.run,
            "metrics": self.metrics.run,
            **self._shared.body_store.loops(),
            **self.batches.loops(),
            **self.alerts.loops(),
            **self.connection_probe.loops(),
            **self.loops(),
            **self.authenticator.loops(),
        }
        run_forever = self._shared.tasks.run_forever
        self._tasks = [
            asyncio.create_task(run_forever(name, loop), name=f"gateway {name}") for name, loop in loops.items()
        ]
        self._port = await serve(edge, self.config)
        self.port = self._port.number
        if self.config.grpc is not None:
            from gateway.grpc.server import GrpcServer  # noqa: PLC0415 - brings grpc: 20 MB
            from gateway.grpc.service import InferenceService  # noqa: PLC0415 - brings grpc: 20 MB

            service = InferenceService(self.open_inference, self.entry, self.config, edge.customer_connections)
            self._grpc = GrpcServer(service, self.config, self.config.grpc)
            self.grpc_port = await self._grpc.start()

    async def ready(self) -> None:
        """Return when the gateway accepts traffic: catalog loaded, subscription acknowledged."""
        await _until(lambda: self.internal.not_ready() is None)

    async def failed(self) -> None:
        """Return when a background task has ended, which is a bug; raises its exception."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def drain(self) -> None:
        """Drain: report not ready, close the port, wait for pending requests, respond 503 to the rest. `stop` follows.

        `hurry` ends the waits.
        """
        self.drain_state.leaving = True
        log.info("gateway draining", open=self.open_requests, notice_ms=self.config.notice_ms)
        await self._within(self.config.notice_ms / 1000, lambda: False)
        await self._close_port()
        await asyncio.gather(*(parts.sweep.end_all(ErrorCode.DRAINING) for parts in self.pools.all))
        with contextlib.suppress(TimeoutError):  # Without this, runs of clients that have left would go on.
            async with asyncio.timeout(LAST_CANCELLATIONS_S):
                await _until(lambda: not any(parts.unsettled for parts in self.pools.all))
        log.info("gateway drained")

    def hurry(self) -> None:
        """End the drain at once: open requests get 503."""
        self._hurried = True

    @property
    def open_requests(self) -> int:
        """Requests without their response, and jobs being accepted."""
        return self._fast_path.under_way + sum(parts.under_way for parts in self.pools.all)

    async def _requests_ended(self, until: float) -> None:
        """Wait until no request is open, for at most the drain time."""
        while self.open_requests and not self._hurried and (left_s := until - time.monotonic()) > 0:
            log.info("gateway draining", open=self.open_requests, left_s=round(left_s))
            await self._within(min(REPORT_EVERY_S, left_s), lambda: not self.open_requests)

    async def _close_port(self) -> None:
        """Stop accepting connections. Each connection that a load balancer may reuse gets one more response."""
        kept_s = min(KEPT_S, self.config.notice_ms / 1000)
        if self._port is not None:
            await self._port.close()
            await self._within(min(LAST_REQUESTS_S, kept_s), lambda: False)
        self.snapshots.subscribers.end()
        self.responses.streams.ends.close()
        if self._grpc is not None:
            grace_s = self.config.drain_timeout_s + LAST_CANCELLATIONS_S
            self._leaving = asyncio.create_task(self._grpc.stop(grace_s), name="gateway gRPC drain")
        until = time.monotonic() + self.config.drain_timeout_s
        if self._edge is not None and kept_s:
            edge = self._edge
            while edge.used_within(kept_s) and not self._hurried and time.monotonic() < until:
                await self._requests_ended(until)
                await self._within(kept_s, lambda: bool(self.open_requests) or not edge.used_within(kept_s))
        self.drain_state.closed = True
        await asyncio.sleep(0)  # Requests that were just read are still served.
        if self._edge is not None:
            self._edge.leave()
        await self._requests_ended(until)

    async def stop(self) -> None:
        """Stop at once; open requests are aborted."""
        if self._grpc is not None:
            await self._grpc.stop(GRPC_LINGER_S)
        if self._leaving is not None:
            await self._leaving
        if self._edge is not None and self._port is not None:
            self._port.abort()
            await self._edge.shutdown(LAST_RESPONSES_S)
        await end_all(self._tasks)
        await self.batches.close()
        await self.alerts.close()
        await self.actions.close()
        self.metrics.close()
        await self.me.close()
        await self.account.close()
        await self.responses.close()
        await self.snapshots.history.close()
        await self.pool_lifecycle.close()
        await self.close()

    async def _within(self, timeout_s: float, condition: Callable[[], bool]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await _until(lambda: self._hurried or condition())


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # several parts change it, and it is waited for once in a process
        await asyncio.sleep(POLL_S)


async def run_gateway(
    config: GatewayConfig,
    catalog: Catalog,
    *,
    find_stored: FindStored | None = None,
    find_usage: FindUsage | None = None,
    tokens: TokenLookup | None = None,
    connect: Connect | None = None,
    traces: RequestTraces | None = None,
    schedule: Schedule | None = None,
    on_ready: Callable[[int], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain, until a second one. The caller starts and stops `catalog`.

    `schedule` does the work of a scheduler for a pool while no scheduler is running. `on_ready` is called once with the port
    when the gateway accepts traffic. Raises StartError if it cannot start, and the exception of a background task that ended.
    """
    leave = asyncio.Event()
    loop = asyncio.get_running_loop()
    gateway = Gateway(
        config, catalog, find_stored, find_usage, tokens, connect=connect, traces=traces, schedule=schedule
    )

    def on_signal() -> None:
        if leave.is_set():
            gateway.hurry()
        leave.set()

    for sign in SIGNALS:
        loop.add_signal_handler(sign, on_signal)
    try:
        await gateway.start()
        await _serve_until(gateway, leave, on_ready)
        await gateway.drain()
    finally:
        await gateway.stop()
        for sign in SIGNALS:
            loop.remove_signal_handler(sign)


async def _report_ready(gateway: Gateway, on_ready: Callable[[int], None] | None) -> None:
    await gateway.ready()
    log.info("gateway ready", port=gateway.port)
    if on_ready is not None:
        on_ready(gateway.port)


async def _serve_until(gateway: Gateway, leave: asyncio.Event, on_ready: Callable[[int], None] | None) -> None:
    """Return when `leave` is set. Raises the exception of a background task that ended."""
    left = asyncio.create_task(leave.wait())
    failed = asyncio.create_task(gateway.failed())
    ready = asyncio.create_task(_report_ready(gateway, on_ready))
    try:
        await asyncio.wait([left, failed], return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            failed.result()
    finally:
        for task in (left, failed, ready):
            task.cancel()
        await asyncio.gather(left, failed, ready, return_exceptions=True)
