"""Does a system do the job? Asked before and after each measurement with many different inputs at a time."""
# ruff: noqa: INP001 - a folder of scripts, not a package

import asyncio
import time
from collections.abc import Callable

import aiohttp
from wrk import Target

POLL_S = 0.2
ASK_S = 5.0
TOGETHER = 96
"""So many at a time that there are several batches."""


class JobError(Exception):
    """A system does not do the job; the message says what it did instead."""


def wait_for(target: Target, within_s: float, still_alive: Callable[[], None]) -> None:
    """Ask until there is a right answer. Raises JobError, and what `still_alive` raises."""
    deadline = time.monotonic() + within_s
    while True:
        still_alive()
        try:
            return asyncio.run(_ask_all(target, 1))
        except JobError as error:
            if time.monotonic() > deadline:
                raise JobError(f"no right answer within {within_s:.0f} s: {error}") from None
        time.sleep(POLL_S)


def check(target: Target) -> None:
    """Each of many callers gets the answer to its own input. Raises JobError."""
    asyncio.run(_ask_all(target, TOGETHER))


async def _ask_all(target: Target, count: int) -> None:
    headers = {"Authorization": f"Bearer {target.keys[0]}"} if target.keys else {}
    timeout = aiohttp.ClientTimeout(total=ASK_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
        await asyncio.gather(*(_ask(session, target.url, f"text {number}") for number in range(count)))


async def _ask(session: aiohttp.ClientSession, url: str, text: str) -> None:
    try:
        async with session.post(url, json={"input": text}) as answer:
            if answer.status != 200:
                raise JobError(f"status {answer.status}")
            body = await answer.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise JobError(f"{type(error).__name__}: {error}") from None
    if not isinstance(body, dict) or body.get("output") != text[::-1]:
        raise JobError(f"a wrong answer to {text!r}: {str(body)[:80]}")
