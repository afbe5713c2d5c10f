"""Open-loop load for tests: each request has a secret that its output must contain, and each result is kept."""

import asyncio
import gc
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import NamedTuple

import aiohttp

from stack import Stack


class Answer(NamedTuple):
    """The result of one request: `request_id` is None if the connection broke without a response."""

    tier: str
    request_id: str | None
    status: int
    code: str | None
    echoed: bool
    seconds: float
    version: str = ""


async def ask(
    session: aiohttp.ClientSession,
    stack: Stack,
    tier: str,
    key: str,
    url: str,
    model: str | None = None,
    **headers: str,
) -> Answer:
    """Send one request."""
    secret = secrets.token_hex(8)
    request = {"input": secret} if model is None else {"input": secret, "model": model}
    headers |= {"Authorization": f"Bearer {key}"}
    began = time.monotonic()
    try:
        async with session.post(f"{url}/v1/inference", json=request, headers=headers) as r:
            body = await r.json(content_type=None) or {}
    except (aiohttp.ClientError, TimeoutError):
        return Answer(tier, None, 0, None, False, time.monotonic() - began)
    error = body.get("error") or {}
    return Answer(
        tier=tier,
        request_id=r.headers["x-request-id"],
        status=r.status,
        code=error.get("code"),
        echoed=body.get("output") == secret[::-1],
        seconds=time.monotonic() - began,
        version=body.get("metadata", {}).get("model_version", ""),
    )


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection in the block: a full one takes 150 ms with ten thousand open requests, and the requests that are
    due then are sent in one burst, of which a system at 80 % of its capacity rejects some of the lowest tier.
    """
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def load(
    stack: Stack,
    rate: float,
    seconds: float,
    tiers: tuple[str, ...],
    model: str | None = None,
    *,
    done: Callable[[], bool] = lambda: True,
) -> list[Answer]:
    """Send `rate` requests/s for `seconds` and until `done`, with the tiers in turn; return all results in order."""
    url, keys = stack.url, {tier: stack.key(tier) for tier in tiers}
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=10))
    async with session:
        with no_collection():
            began = time.monotonic()
            tasks: list[asyncio.Task[Answer]] = []
            for i in count():
                if i >= int(rate * seconds) and done():
                    break
                await asyncio.sleep(max(0.0, began + i / rate - time.monotonic()))
                tier = tiers[i % len(tiers)]
                tasks.append(asyncio.create_task(ask(session, stack, tier, keys[tier], url, model)))
            return list(await asyncio.gather(*tasks))


def verdict(answers: list[Answer]) -> dict[str, int]:
    """The number of results that break a guarantee, by kind."""
    ids = [a.request_id for a in answers]
    return {
        "unanswered": ids.count(None),
        "duplicated": len(ids) - len(set(ids)),
        "failed": sum(a.status != 200 for a in answers),
        "crossed": sum(a.status == 200 and not a.echoed for a in answers),
        "late": sum(a.seconds > 4.1 for a in answers),
    }


def unwell(answers: list[Answer]) -> list[Answer]:
    """The results that are not 200, for the message of a test."""
    return [a for a in answers if a.status != 200]


ALL_WELL = dict.fromkeys(verdict([]), 0)


async def one_row_each(stack: Stack, answers: list[Answer]) -> int:
    """Check that each request has one completed row; return the number of those with several attempts."""
    rows = await stack.audited([a.request_id for a in answers if a.request_id])
    assert {r["status"] for r in rows.values()} == {"completed"}
    return sum(row["attempts"] > 1 for row in rows.values())
