"""The workers of the stack's own pool, as many as the gateway advises (`tierlane up --autoscale`).

Once a second the gateway is asked; a worker more is started, a worker less is told to leave, ends what it runs, and is
forgotten. Always over one connection: of several gateways on one port it is then the same one that is asked, and two
that advise a second apart cannot contradict each other here.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import aiohttp

from tierlane.up.data_dir import LogLines
from tierlane.up.members import StackMember
from tierlane.up.supervisor import Supervisor

ASK_S = 1.0
CALL_TIMEOUT_S = 1.0
LEAVE_S = 15.0
"""A worker that was told to leave ends within four seconds; one that has not by then is killed, and its batch retried."""


class PoolAdvice(NamedTuple):
    """What the gateway says of the pool: workers that it finds healthy, how many it advises, and why."""

    healthy: int
    recommended: int
    reason: str


def change(members: int, asked: PoolAdvice) -> int:
    """How many workers to start (or, below 0, to drain), where `members` are started and not leaving. Pure.

    One that is started and not healthy yet is on its way, or is being started again: it is neither replaced nor drained.
    """
    if asked.recommended > members:
        return asked.recommended - members
    return min(0, asked.recommended - min(members, asked.healthy))


def free_names(taken: Iterable[str], count: int) -> list[str]:
    """The first names of workers that nobody has."""
    names, number = set(taken), 0
    found: list[str] = []
    while len(found) < count:
        number += 1
        if (name := f"worker-{number}") not in names:
            found.append(name)
    return found


class WorkerAutoscaler:
    """The workers that come and go. `make` builds the member of a name."""

    def __init__(
        self,
        supervisor: Supervisor,
        make: Callable[[str], StackMember],
        lines: LogLines,
        *,
        pool: str,
        url: str,
        token: str,
    ) -> None:
        self._supervisor = supervisor
        self._make = make
        self._lines = lines
        self._pool = pool
        self._url = f"{url}/internal/autoscale"
        self._headers = {"Authorization": f"Bearer {token}"}
        self._workers: list[StackMember] = []
        self._leaving: set[asyncio.Task[None]] = set()

    async def start(self, count: int) -> None:
        """Start the first ones. Raises what a worker's first start raises."""
        for name in free_names([], count):
            await self._add(name)

    async def follow(self) -> None:
        """Obey the gateway forever."""
        timeout = aiohttp.ClientTimeout(total=CALL_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=1)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers) as session:
            while True:
                asked = await self._ask(session)
                if asked is not None:
                    await self.obey(asked)
                await asyncio.sleep(ASK_S)

    async def obey(self, asked: PoolAdvice) -> None:
        """Start or drain as many as it takes."""
        more = change(len(self._workers), asked)
        if more:
            self._lines.say(f"{len(self._workers)} workers become {len(self._workers) + more}: {asked.reason}")
        for name in free_names((member.name for member in self._supervisor.members), max(0, more)):
            with contextlib.suppress(OSError):  # No process can be had now; the next answer asks for it again.
                await self._add(name)
        for _ in range(-more):
            task = asyncio.create_task(self._supervisor.remove(self._workers.pop(), LEAVE_S))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _add(self, name: str) -> None:
        member = self._make(name)
        try:
            await self._supervisor.add(member)
        except OSError:
            self._supervisor.members.remove(member)
            raise
        self._workers.append(member)

    async def _ask(self, session: aiohttp.ClientSession) -> PoolAdvice | None:
        """None where nobody answers as expected: then everything stays as it is."""
        try:
            async with session.get(self._url) as answer:
                return self._read(await answer.json(content_type=None)) if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError):
            return None

    def _read(self, document: Any) -> PoolAdvice:
        row = document["pools"][self._pool]
        return PoolAdvice(int(row["current_workers"]), int(row["recommended_workers"]), str(row["reason"]))
