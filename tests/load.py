"""Open-loop load for tests: every request carries a secret that its answer must echo, every outcome is kept."""

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
    """What one request got: `request_id` is None where the connection gave no answer at all."""

    tier: str
    request_id: str | None
    status: int
    code: str | None
    echoed: bool
    seconds: float
    version: str = ""


async def ask(
    session: aiohttp.ClientSession, stack: Stack, tier: str, key: str, url: str, model: str | None = None
) -> Answer:
    """One request, one answer."""
    secret = secrets.token_hex(8)
    wish = {"input": secret} if model is None else {"input": secret, "model": model}
    began = time.monotonic()
    try:
        async with session.post(f"{url}/v1/inference", json=wish, headers={"Authorization": f"Bearer {key}"}) as r:
            body = await r.json(content_type=None)
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
    """No garbage collection meanwhile: a full one takes 150 ms with ten thousand requests open, and the requests that are
    due then leave in one burst, of which a system at 80 % of its capacity rightly rejects some of the lowest tier.
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
    """`rate` requests/s for so long, and on until `done`, the tiers in turn; returns every answer, in the order of sending."""
    url, keys = stack.url, {tier: stack.key(tier) for tier in tiers}
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=10))
    async with session:
        with no_collection():
            began = time.monotonic()
            asked: list[asyncio.Task[Answer]] = []
            for i in count():
                if i >= int(rate * seconds) and done():
                    break
                await asyncio.sleep(max(0.0, began + i / rate - time.monotonic()))
                tier = tiers[i % len(tiers)]
                asked.append(asyncio.create_task(ask(session, stack, tier, keys[tier], url, model)))
            return list(await asyncio.gather(*asked))


def verdict(answers: list[Answer]) -> dict[str, int]:
    """What went wrong, by kind: all zero in a system that keeps its promise."""
    ids = [a.request_id for a in answers]
    return {
        "unanswered": ids.count(None),
        "duplicated": len(ids) - len(set(ids)),
        "failed": sum(a.status != 200 for a in answers),
        "crossed": sum(a.status == 200 and not a.echoed for a in answers),
        "late": sum(a.seconds > 4.1 for a in answers),
    }


def unwell(answers: list[Answer]) -> list[Answer]:
    """The answers that a verdict counts as failed, for the message of a test: a code says more than a number."""
    return [a for a in answers if a.status != 200]


ALL_WELL = dict.fromkeys(verdict([]), 0)


async def one_row_each(stack: Stack, answers: list[Answer]) -> int:
    """Every answered request has one closed row that says the same; returns how many needed a second attempt."""
    rows = await stack.audited([a.request_id for a in answers if a.request_id])
    assert {r["status"] for r in rows.values()} == {"completed"}
    return sum(row["attempts"] > 1 for row in rows.values())
