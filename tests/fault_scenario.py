"""A running stack with two gateways under load, the faults that a test injects, and how each is healed."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from itertools import count
from pathlib import Path

import aiohttp

from admin import NO_LIMITS, add_customer, sql
from health_observers import HealthObserver, observers
from load import Answer, ask
from second_gateway import second_gateway
from stack import Stack
from tierlane_local.child_process import family

TIERS = ("enterprise", "paid", "free")
RATE = 24.0
FLOOD_RATE = 350.0
FLOOD_CUSTOMER = "flood-free"

Heal = Callable[[], Awaitable[None]]


class FaultScenario:
    """The stack, its second gateway (which may be killed and restarted), its load, and the observers of health."""

    def __init__(self, stack: Stack, home: Path) -> None:
        self.stack = stack
        self._home = home
        self._second = contextlib.AsyncExitStack()
        self._watched = contextlib.AsyncExitStack()
        self._first: list[HealthObserver] = []
        self._other: list[HealthObserver] = []
        self._urls = [stack.url]
        self._token = stack.info.service_token
        self.answers: dict[str, list[Answer]] = {}  # By the URL of the gateway.

    @property
    def observers(self) -> list[HealthObserver]:
        """Of every running gateway."""
        return [*self._first, *self._other]

    async def begin(self) -> None:
        self._first = await self._watched.enter_async_context(observers(self.stack.url, self._token, "first"))
        await self.start_second()
        keys = {tier: self.stack.key(tier) for tier in TIERS}
        self._load = asyncio.create_task(self._send_load(RATE, keys, self.answers))

    async def end(self) -> None:
        await self.stop_load()
        await self._second.aclose()
        await self._watched.aclose()

    async def stop_load(self) -> None:
        """End the load, and wait for every answer."""
        self._load.cancel()
        await asyncio.gather(self._load, return_exceptions=True)

    @property
    def without_response(self) -> int:
        """The number of requests whose connection was lost before a response."""
        return sum(answer.request_id is None for several in self.answers.values() for answer in several)

    async def start_second(self) -> None:
        process, url = await self._second.enter_async_context(second_gateway(self.stack, self._home))
        self._process = process
        self._other = await self._second.enter_async_context(observers(url, self._token, "second"))
        self._urls = [self.stack.url, url]

    async def _send_load(self, rate: float, keys: Mapping[str, str], answers: dict[str, list[Answer]]) -> None:
        """Send requests of these tiers to all gateways until cancelled; then wait for every answer."""
        tiers = list(keys)
        sent: set[asyncio.Task[None]] = set()
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=10)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

            async def send(tier: str, url: str) -> None:
                answers.setdefault(url, []).append(await ask(session, self.stack, tier, keys[tier], url))

            with contextlib.suppress(asyncio.CancelledError):
                for number in count():
                    tier, url = tiers[number % len(tiers)], self._urls[number % len(self._urls)]
                    sent.add(asyncio.create_task(send(tier, url)))
                    await asyncio.sleep(1 / rate)
            await asyncio.gather(*sent)

    async def kill(self, role: str, name: str) -> Heal:
        """Kill one process, which `tierlane up` restarts."""
        os.kill(self.stack.pids(role)[name], signal.SIGKILL)
        return _no_heal

    async def suspend(self, role: str, *names: str) -> Heal:
        """Suspend processes: they are not restarted, and their connections stay open."""
        pids = [pid for name, pid in self.stack.pids(role).items() if not names or name in names]
        pids = [each.pid for pid in pids for each in family(pid)] if role == "postgres" else pids
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)

        async def resume() -> None:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

        return resume

    async def kill_second_gateway(self) -> Heal:
        """Kill the second gateway; it returns under another name with the same data directory."""
        self._urls = [self.stack.url]
        self._process.kill()
        self._other = []

        async def restart() -> None:
            await self._second.aclose()
            await self.start_second()

        return restart

    async def execute(self, change: str, undo: str) -> Heal:
        """Execute a statement of an administrator, and the one that reverts it."""
        await sql(self.stack, change)

        async def revert() -> None:
            await sql(self.stack, undo)

        return revert

    async def flood(self) -> Heal:
        """Send far more requests of free than the GPUs can serve."""
        customer = await add_customer(self.stack, FLOOD_CUSTOMER, "free", **NO_LIMITS)
        flood = asyncio.create_task(self._send_load(FLOOD_RATE, {"free": customer.key}, {}))

        async def end() -> None:
            flood.cancel()
            await asyncio.gather(flood, return_exceptions=True)

        return end


async def _no_heal() -> None:
    """The fault heals itself."""


@contextlib.asynccontextmanager
async def fault_scenario(stack: Stack, home: Path) -> AsyncIterator[FaultScenario]:
    """Run a second gateway and load until the block ends; then every answer has arrived."""
    scenario = FaultScenario(stack, home)
    await scenario.begin()
    try:
        yield scenario
    finally:
        await scenario.end()
