"""Observers of a gateway in tests: its health, which is polled, and the event stream of its dashboard."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NamedTuple

import aiohttp

Document = Mapping[str, Any]

ASK_EVERY_S = 0.05
GIVE_UP_S = 1.0


class Told(NamedTuple):
    """One document, and its time (monotonic seconds)."""

    at: float
    document: Document


class Onlooker:
    """The documents of one observer, the oldest first."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.heard: list[Told] = []

    def hear(self, document: Document) -> None:
        self.heard.append(Told(time.monotonic(), document))

    def first(self, since: float, says: Callable[[Document], bool]) -> float | None:
        """Seconds from `since` until the first document for which `says` is true, or None."""
        return next((at - since for at, document in self.heard if at >= since and says(document)), None)

    def says(self, what: Callable[[Document], bool]) -> bool:
        """Whether it is true for the latest document."""
        return bool(self.heard) and what(self.heard[-1].document)

    def story(self, since: float) -> str:
        """The documents since then, shortened and without repeats, for a failing test."""
        told: list[str] = []
        for at, document in self.heard:
            short = f"{document['status']}, {document['healthy_gpus']} GPUs, {list(document['reasons'])}"
            if at >= since and not (told and told[-1].endswith(short)):
                told.append(f"  {at - since:6.2f} {short}")
        return "\n".join([self.name, *told])


async def _ask(session: aiohttp.ClientSession, url: str, onlooker: Onlooker) -> None:
    while True:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with session.get(f"{url}/internal/health", timeout=aiohttp.ClientTimeout(total=GIVE_UP_S)) as answer:
                onlooker.hear(await answer.json(content_type=None))
        await asyncio.sleep(ASK_EVERY_S)


async def _listen(session: aiohttp.ClientSession, url: str, onlooker: Onlooker) -> None:
    headers, forever = {"Accept": "text/event-stream"}, aiohttp.ClientTimeout(total=None)
    while True:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with session.get(f"{url}/internal/dashboard/events", headers=headers, timeout=forever) as answer:
                kind = b""
                async for line in answer.content:
                    if line.startswith(b"event: "):
                        kind = line[7:].strip()
                    elif line.startswith(b"data: ") and kind == b"state":
                        onlooker.hear(json.loads(line[6:]))
        await asyncio.sleep(ASK_EVERY_S)


@contextlib.asynccontextmanager
async def onlookers(url: str, token: str, name: str) -> AsyncIterator[list[Onlooker]]:
    """One of the health and one of the dashboard of the gateway at `url`, until the block ends."""
    found = [Onlooker(f"{name} health"), Onlooker(f"{name} page")]
    # The history of 15 minutes is one long line.
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}, read_bufsize=1 << 22) as session:
        tasks = [
            asyncio.create_task(watch(session, url, who)) for watch, who in zip((_ask, _listen), found, strict=True)
        ]
        try:
            yield found
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
