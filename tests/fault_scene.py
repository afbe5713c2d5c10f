"""A running stack with two gateways whose parts a test breaks one after another: what is broken, how, and how it is mended."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import psutil

from admin import NO_LIMITS, add_customer, sql
from load import Answer, ask
from onlookers import Onlooker, onlookers
from second_gateway import second_gateway
from stack import Stack

TIERS = ("enterprise", "paid", "free")
RATE = 24.0
FLOOD_RATE = 350.0
FLOODER = "flood-free"

Mend = Callable[[], Awaitable[None]]


class Scene:
    """The stack, its second gateway (which may be killed and started again), its load, and who looks on."""

    def __init__(self, stack: Stack, home: Path) -> None:
        self.stack = stack
        self._home = home
        self._second = contextlib.AsyncExitStack()
        self._watched = contextlib.AsyncExitStack()
        self._first: list[Onlooker] = []
        self._other: list[Onlooker] = []
        self._urls = [stack.url]
        self._token = stack.read()["service_token"]
        self.answers: dict[str, list[Answer]] = {}  # By the address that was asked.

    @property
    def looking_on(self) -> list[Onlooker]:
        """At every gateway that lives."""
        return [*self._first, *self._other]

    async def begin(self) -> None:
        self._first = await self._watched.enter_async_context(onlookers(self.stack.url, self._token, "first"))
        await self.start_second()
        self._load = asyncio.create_task(self._keep_asking())

    async def end(self) -> None:
        await self.fall_silent()
        await self._second.aclose()
        await self._watched.aclose()

    async def fall_silent(self) -> None:
        """No more load; every answer is waited for."""
        self._load.cancel()
        await asyncio.gather(self._load, return_exceptions=True)

    @property
    def broken(self) -> int:
        """Requests whose connection broke before there was an answer."""
        return sum(answer.request_id is None for told in self.answers.values() for answer in told)

    async def start_second(self) -> None:
        process, url = await self._second.enter_async_context(second_gateway(self.stack, self._home))
        self._process = process
        self._other = await self._second.enter_async_context(onlookers(url, self._token, "second"))
        self._urls = [self.stack.url, url]

    async def _keep_asking(self) -> None:
        """Load in all tiers and at both gateways, until it is cancelled; then every answer is waited for."""
        keys = {tier: self.stack.key(tier) for tier in TIERS}
        asked: set[asyncio.Task[None]] = set()
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=10)
        ) as session:
            with contextlib.suppress(asyncio.CancelledError):
                for count in range(1_000_000):
                    tier, url = TIERS[count % 3], self._urls[count % len(self._urls)]
                    asked.add(asyncio.create_task(self._one(session, tier, keys[tier], url)))
                    await asyncio.sleep(1 / RATE)
            await asyncio.gather(*asked)

    async def _one(self, session: aiohttp.ClientSession, tier: str, key: str, url: str) -> None:
        self.answers.setdefault(url, []).append(await ask(session, self.stack, tier, key, url))

    # --- what can be broken ---------------------------------------------------------------------------------------

    async def kill(self, role: str, name: str) -> Mend:
        """Whoever keeps the stack running starts it again."""
        os.kill(self.stack.pids(role)[name], signal.SIGKILL)
        return _nothing

    async def stop(self, role: str, *names: str) -> Mend:
        """They stand still: nobody starts them again, and their connections stay."""
        pids = [pid for name, pid in self.stack.pids(role).items() if not names or name in names]
        family = [each.pid for pid in pids for each in _family(pid)] if role == "postgres" else pids
        for pid in family:
            os.kill(pid, signal.SIGSTOP)

        async def go_on() -> None:
            for pid in family:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

        return go_on

    async def kill_second_gateway(self) -> Mend:
        """Its requests break; it comes back under another name, with what its folder holds."""
        self._urls = [self.stack.url]
        self._process.kill()
        self._other = []

        async def start_again() -> None:
            await self._second.aclose()
            await self.start_second()

        return start_again

    async def tell(self, change: str, undo: str) -> Mend:
        """A statement of an admin, and the one that takes it back."""
        await sql(self.stack, change)

        async def take_back() -> None:
            await sql(self.stack, undo)

        return take_back

    async def flood(self) -> Mend:
        """A customer of free without a limit of its own sends far more than the GPUs can do."""
        flooder = await add_customer(self.stack, FLOODER, "free", **NO_LIMITS)
        return _ender(asyncio.create_task(self._pour(flooder.key)))

    async def _pour(self, key: str) -> None:
        asked: set[asyncio.Task[Answer]] = set()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            with contextlib.suppress(asyncio.CancelledError):
                for count in range(1_000_000):
                    url = self._urls[count % len(self._urls)]
                    asked.add(asyncio.create_task(ask(session, self.stack, "free", key, url)))
                    await asyncio.sleep(1 / FLOOD_RATE)
            await asyncio.gather(*asked)


def _family(pid: int) -> list[psutil.Process]:
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def _ender(task: asyncio.Task[None]) -> Mend:
    async def end() -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    return end


async def _nothing() -> None:
    """It mends itself."""


@contextlib.asynccontextmanager
async def fault_scene(stack: Stack, home: Path) -> AsyncIterator[Scene]:
    """A second gateway beside the stack's, and load, until the block ends; afterwards every answer is there."""
    scene = Scene(stack, home)
    await scene.begin()
    try:
        yield scene
    finally:
        await scene.end()
