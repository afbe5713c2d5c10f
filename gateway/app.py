"""The gateway put together: its parts, its loops, its doors. The only place that knows all of them."""

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Callable

import structlog
from aiohttp import web

from gateway.admitter import Admitter, Limits
from gateway.audit_lag import AuditLag
from gateway.beat import Beat
from gateway.cancels import Cancels
from gateway.catalog_view import CatalogView
from gateway.config import GatewayConfig
from gateway.doors import Doors
from gateway.edge import EdgeServer, check_parser, serve
from gateway.endless import end_all
from gateway.faults import Faults
from gateway.inference import Inference, InferenceParts
from gateway.internal import FindStored, Internal, InternalParts
from gateway.limits import LiveLimits
from gateway.meter import Meter
from gateway.routes import Routes
from gateway.subscriber import Subscriber
from gateway.sweep import DeadlineSweep
from gateway.waiters import Waiters
from scheduler.admission import Admissions
from scheduler.connections import check_server, command_client, subscriber_client
from scheduler.endings import Endings
from scheduler.errors import ErrorCode, RedisUnavailable
from scheduler.keys import Keys
from scheduler.presence import Presence
from scheduler.replies import Results

log = structlog.get_logger("gateway")

POLL_S = 0.02
LAST_CANCELS_S = 0.5
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Gateway:
    """One gateway process. `start` listens, `drain` answers every accepted request, `stop` ends it."""

    def __init__(self, config: GatewayConfig, catalog: CatalogView, find_stored: FindStored | None = None) -> None:
        self.config = config
        self._catalog = catalog
        self._client = command_client(config.redis_url)
        self._subscriber_client = subscriber_client(config.redis_url)
        keys = Keys(config.pool)
        results = Results(self._client, keys)
        endings = Endings(self._client, keys)
        admissions = Admissions(self._client, keys, config.gateway_id)
        self._presence = Presence(self._client, keys, gone_ms=config.gone_ms)
        self.doors = Doors()
        self.waiters = Waiters()
        self.cancels = Cancels(endings)
        self.limits = LiveLimits(config.pool)
        self.admitter = Admitter(admissions, self._limits_now, self.cancels, config.max_pending)
        self.sweep = DeadlineSweep(self.waiters, endings, self.cancels)
        meter = Meter(config.gateway_id, time.monotonic())
        self.beat = Beat(self._presence, catalog, self.limits, meter)
        self.subscriber = Subscriber(self._subscriber_client, keys.responses(config.gateway_id), self.waiters, results)
        faults = Faults(random.random)
        inference = Inference(
            InferenceParts(
                config=config,
                catalog=catalog,
                limits=self.limits,
                waiters=self.waiters,
                admitter=self.admitter,
                cancels=self.cancels,
                meter=meter,
                faults=faults,
                doors=self.doors,
            )
        )
        self.internal = Internal(
            InternalParts(
                service_token=config.service_token,
                catalog=catalog,
                limits=self.limits,
                beat=self.beat,
                subscriber=self.subscriber,
                results=results,
                audit_lag=AuditLag(self._client, keys),
                doors=self.doors,
                find_stored=find_stored,
            )
        )
        self._routes = build_routes(inference, self.internal)
        self._faults = faults
        self._tasks: list[asyncio.Task[None]] = []
        self._runner: web.ServerRunner | None = None
        self._edge: EdgeServer | None = None
        self.port = config.port

    async def start(self) -> None:
        """Begin to beat, subscribe and listen. Raises StartError for what the process cannot stand on.

        Redis need not be there yet: until it is, requests are refused and `/readyz` says no.
        """
        check_parser()
        try:
            await check_server(self._client)
        except RedisUnavailable as error:
            log.warning("starting without Redis", reason=str(error))
        await self.beat.beat()
        edge = self._edge = EdgeServer(self._routes, self._faults, self.doors, self.config)
        loops = {
            "admitter": self.admitter.run(),
            "cancels": self.cancels.run(),
            "subscriber": self.subscriber.run(),
            "catch-up": self.subscriber.catch_up_forever(),
            "deadlines": self.sweep.run(),
            "beat": self.beat.run(),
            "edge": edge.sweep_forever(),
        }
        self._tasks = [asyncio.create_task(loop, name=f"gateway {name}") for name, loop in loops.items()]
        self._runner, self.port = await serve(edge, self.config)

    async def ready(self) -> None:
        """Return when traffic may come: catalog loaded, subscription acknowledged."""
        await _until(lambda: self.internal.not_ready() is None)

    async def failed(self) -> None:
        """Return only when one of the loops has ended, which none of them should; raises what ended it."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def drain(self) -> None:
        """Leave: announce, close the doors, wait for those inside, answer the rest 503. `stop` comes after it."""
        self.doors.leaving = True
        await asyncio.sleep(self.config.drain_ms / 1000)
        await self._close_doors()
        await self._within(self.config.drain_timeout_s, lambda: not len(self.waiters))
        for waiter in self.waiters.all():
            self.cancels.add(waiter.id, ErrorCode.DRAINING)
            waiter.finish(ErrorCode.DRAINING)
        await self._within(LAST_CANCELS_S, lambda: not len(self.waiters) and not len(self.cancels))

    async def _close_doors(self) -> None:
        self.doors.closed = True
        if self._runner is not None and self._edge is not None:
            for site in self._runner.sites:
                await site.stop()
            await asyncio.sleep(0)  # What has just been read becomes a request that is answered.
            self._edge.leave()

    async def stop(self) -> None:
        """Stop at once: what still runs is cut off."""
        if self._runner is not None:
            await self._runner.cleanup()
        await end_all(self._tasks)
        with contextlib.suppress(RedisUnavailable):
            await self._presence.gateway_gone(self.config.gateway_id)
        await self._client.aclose()
        await self._subscriber_client.aclose()

    def _limits_now(self) -> Limits:
        snapshot = self._catalog.snapshot
        return Limits((), 0.0) if snapshot is None else self.limits.current(snapshot)

    async def _within(self, timeout_s: float, condition: Callable[[], bool]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await _until(condition)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # several parts change it, and it is waited for once in a process
        await asyncio.sleep(POLL_S)


def build_routes(inference: Inference, internal: Internal) -> Routes:
    """Every address that this gateway answers."""
    routes = Routes()
    routes.add("POST", "/v1/inference", inference)
    routes.add("GET", "/internal/health", internal.health)
    routes.add("GET", "/internal/requests/{id}", internal.request)
    for method in ("GET", "HEAD"):
        routes.add(method, "/livez", internal.livez)
        routes.add(method, "/readyz", internal.readyz)
    return routes


async def run_gateway(
    config: GatewayConfig,
    catalog: CatalogView,
    find_stored: FindStored | None = None,
    on_ready: Callable[[int], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain. `catalog` is running already and is stopped by the caller.

    `on_ready` is called once with the port when traffic may come. Raises StartError where it cannot start, and
    whatever broke one of its loops.
    """
    leave = asyncio.Event()
    loop = asyncio.get_running_loop()
    for sign in SIGNALS:
        loop.add_signal_handler(sign, leave.set)
    gateway = Gateway(config, catalog, find_stored)
    try:
        await gateway.start()
        await _serve_until(gateway, leave, on_ready)
        await gateway.drain()
    finally:
        await gateway.stop()
        for sign in SIGNALS:
            loop.remove_signal_handler(sign)


async def _tell(gateway: Gateway, on_ready: Callable[[int], None] | None) -> None:
    await gateway.ready()
    if on_ready is not None:
        on_ready(gateway.port)


async def _serve_until(gateway: Gateway, leave: asyncio.Event, on_ready: Callable[[int], None] | None) -> None:
    """Return when asked to leave. Raises what broke a loop."""
    left = asyncio.create_task(leave.wait())
    failed = asyncio.create_task(gateway.failed())
    ready = asyncio.create_task(_tell(gateway, on_ready))
    try:
        await asyncio.wait([left, failed], return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            failed.result()
    finally:
        for task in (left, failed, ready):
            task.cancel()
        await asyncio.gather(left, failed, ready, return_exceptions=True)
