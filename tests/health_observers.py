"""Observers of a stack in tests: the health of each gateway, which is polled, and the events of its dashboard."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NamedTuple

import aiohttp

Document = Mapping[str, Any]

POLL_S = 0.05
TIMEOUT_S = 1.0


class ReceivedDocument(NamedTuple):
    """One document, and the time of its arrival (monotonic seconds)."""

    at: float
    document: Document


class HealthObserver:
    """The received documents of one source, the oldest first."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.documents: list[ReceivedDocument] = []

    def receive(self, document: Document) -> None:
        self.documents.append(ReceivedDocument(time.monotonic(), document))

    def first(self, since: float, matches: Callable[[Document], bool]) -> float | None:
        """Seconds from `since` until the first matching document; None without one."""
        return next((at - since for at, document in self.documents if at >= since and matches(document)), None)

    def shows(self, matches: Callable[[Document], bool]) -> bool:
        """Whether the latest document matches."""
        return bool(self.documents) and matches(self.documents[-1].document)

    def log(self, since: float) -> str:
        """The documents since then in short, without repetitions."""
        lines: list[str] = []
        for at, document in self.documents:
            short = f"{document['status']}, {document['healthy_gpus']} GPUs, {list(document['reasons'])}"
            if at >= since and not (lines and lines[-1].endswith(short)):
                lines.append(f"  {at - since:6.2f} {short}")
        return "\n".join([self.name, *lines])


async def _poll(session: aiohttp.ClientSession, url: str, observer: HealthObserver) -> None:
    while True:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with session.get(f"{url}/internal/health", timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as answer:
                observer.receive(await answer.json(content_type=None))
        await asyncio.sleep(POLL_S)


async def _subscribe(session: aiohttp.ClientSession, url: str, observer: HealthObserver) -> None:
    headers, forever = {"Accept": "text/event-stream"}, aiohttp.ClientTimeout(total=None)
    while True:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with session.get(f"{url}/internal/dashboard/events", headers=headers, timeout=forever) as answer:
                kind = b""
                async for line in answer.content:
                    if line.startswith(b"event: "):
                        kind = line[7:].strip()
                    elif line.startswith(b"data: ") and kind == b"state":
                        observer.receive(json.loads(line[6:]))
        await asyncio.sleep(POLL_S)


@contextlib.asynccontextmanager
async def observers(url: str, token: str, name: str) -> AsyncIterator[list[HealthObserver]]:
    """Observers of the health and the dashboard of the gateway at `url`, until the block ends."""
    found = [HealthObserver(f"{name} health"), HealthObserver(f"{name} page")]
    # The history of the dashboard is one long line.
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}, read_bufsize=1 << 22) as session:
        tasks = [
            asyncio.create_task(watch(session, url, observer))
            for watch, observer in zip((_poll, _subscribe), found, strict=True)
        ]
        try:
            yield found
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
