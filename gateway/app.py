"""The gateway's life: it starts its loops and opens its doors, serves, drains, and stops."""

import asyncio
import contextlib
import signal
from collections.abc import Callable

import structlog
from aiohttp import web

from gateway.api.account import FindUsage
from gateway.auth.authenticator import TokenLookup
from gateway.catalog import CatalogView
from gateway.config import GatewayConfig
from gateway.http.server import EdgeServer, check_parser, serve
from gateway.inference.traces import RequestTraces
from gateway.operations.action_requests import Connect
from gateway.operations.endpoints import FindStored
from gateway.standby_scheduler import Schedule
from gateway.wiring import GatewayParts
from scheduler.errors import ErrorCode, RedisUnavailable
from scheduler.redis_client.connections import check_server
from scheduler.tasks import end_all

log = structlog.get_logger("gateway")

POLL_S = 0.02
LAST_CANCELS_S = 0.5
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Gateway(GatewayParts):
    """One gateway process. `start` listens, `drain` answers every accepted request, `stop` ends it."""

    def __init__(
        self,
        config: GatewayConfig,
        catalog: CatalogView,
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
        self.direct.open()
        await self.heartbeat.heartbeat()
        edge = self._edge = EdgeServer(
            self._routes, self._shared.faults, self.drain_state, self.config, self._fast_path
        )
        loops = {
            "edge": edge.sweep_forever,
            "pools": self.pools.run,
            "snapshots": self.snapshots.run,
            "metrics": self.metrics.run,
            **self.loops(),
            **self.identities.loops(),
        }
        run_forever = self._shared.tasks.run_forever
        self._tasks = [
            asyncio.create_task(run_forever(name, loop), name=f"gateway {name}") for name, loop in loops.items()
        ]
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
        self.drain_state.leaving = True
        await asyncio.sleep(self.config.drain_ms / 1000)
        await self._close_doors()
        everywhere = self.pools.all
        await self._within(self.config.drain_timeout_s, lambda: not any(parts.under_way for parts in everywhere))
        await asyncio.gather(*(parts.sweep.end_all(ErrorCode.DRAINING) for parts in everywhere))
        await self._within(LAST_CANCELS_S, lambda: not any(parts.unsettled for parts in everywhere))

    async def _close_doors(self) -> None:
        self.drain_state.closed = True
        self.snapshots.subscribers.end()
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
        await self.actions.close()
        self.metrics.close()
        await self.me.close()
        await self.snapshots.history.close()
        await self.pools.close()
        await self.close()

    async def _within(self, timeout_s: float, condition: Callable[[], bool]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await _until(condition)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # several parts change it, and it is waited for once in a process
        await asyncio.sleep(POLL_S)


async def run_gateway(
    config: GatewayConfig,
    catalog: CatalogView,
    *,
    find_stored: FindStored | None = None,
    find_usage: FindUsage | None = None,
    tokens: TokenLookup | None = None,
    connect: Connect | None = None,
    traces: RequestTraces | None = None,
    schedule: Schedule | None = None,
    on_ready: Callable[[int], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain. `catalog` is running already and is stopped by the caller.

    `schedule` does for a pool what a scheduler does, while none does. `on_ready` is called once with the port when traffic may come. Raises StartError where it cannot start, and
    whatever broke one of its loops.
    """
    leave = asyncio.Event()
    loop = asyncio.get_running_loop()
    for sign in SIGNALS:
        loop.add_signal_handler(sign, leave.set)
    gateway = Gateway(
        config, catalog, find_stored, find_usage, tokens, connect=connect, traces=traces, schedule=schedule
    )
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
