"""Roles that are killed every three seconds at 300 requests/s: hardly a request fails, and none is answered late."""

import asyncio
import os
import secrets
import signal
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest

from eventually import eventually
from stack import Stack, start_stack

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

RATE, SECONDS, EVERY_S = 300, 30.0, 3.0
OPTIONS = ("--backend", "simulated:50", "--workers", "4")
TIERS = ("enterprise", "paid", "free")
LATEST_S = 4.1  # The deadline of a request and 100 ms.
GAVE_UP_S = 10.0


class Told(NamedTuple):
    """What a client was told in the end: 0 for nothing at all; `tries` connections, the last of which answered."""

    status: int
    seconds: float
    tries: int
    code: str = ""


async def ask(session: aiohttp.ClientSession, url: str, key: str) -> Told:
    """One request, sent once more under its Idempotency-Key where its connection was lost before any byte of an answer."""
    secret = secrets.token_hex(8)
    headers = {"Authorization": f"Bearer {key}", "Idempotency-Key": secret}
    began = time.monotonic()
    for tries in (1, 2):
        try:
            async with session.post(f"{url}/v1/inference", json={"input": secret}, headers=headers) as answer:
                body = await answer.json(content_type=None)
                assert answer.status != 200 or body["output"] == secret[::-1]
                code = (body.get("error") or {}).get("code", "")
                return Told(answer.status, time.monotonic() - began, tries, code)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            continue
        except (aiohttp.ClientError, TimeoutError):
            break
    return Told(0, time.monotonic() - began, 2)


async def load(stack: Stack) -> list[Told]:
    """Requests at even distances, each on a connection that is free or a new one."""
    url, keys = stack.url, [stack.key(tier) for tier in TIERS]
    timeout = aiohttp.ClientTimeout(total=GAVE_UP_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        began = time.monotonic()
        asked = []
        for number in range(int(RATE * SECONDS)):
            await asyncio.sleep(max(0.0, began + number / RATE - time.monotonic()))
            asked.append(asyncio.create_task(ask(session, url, keys[number % len(keys)])))
        return list(await asyncio.gather(*asked))


async def kill_one_every_three_seconds(stack: Stack, role: str) -> int:
    """The first by name, whenever it is due, as soon as it is there again; returns how many were killed."""
    began, killed = time.monotonic(), set[int]()
    for number in range(1, int(SECONDS / EVERY_S)):
        await asyncio.sleep(max(0.0, began + number * EVERY_S - time.monotonic()))

        def another() -> int | None:
            _, pid = min(stack.pids(role).items(), default=("", 0))
            return pid if pid not in killed | {0} else None

        pid = await eventually(another, f"another {role}")
        os.kill(pid, signal.SIGKILL)
        killed.add(pid)
    return len(killed)


def told(what: str, answers: Iterable[Told]) -> tuple[float, float, float]:
    """Shares of 200 with and without the clients' second try, and the longest answer in seconds."""
    found = list(answers)
    well = sum(each.status == 200 for each in found) / len(found)
    first = sum(each.status == 200 and each.tries == 1 for each in found) / len(found)
    latest = max(each.seconds for each in found)
    codes = Counter(each.code or str(each.status) for each in found)
    print(f"{what}: {well:.2%} answered 200 ({first:.2%} at the first try), latest {latest:.2f} s, {dict(codes)}")
    return well, first, latest


@pytest.mark.parametrize(
    ("role", "options", "least"),
    [("scheduler", (), 0.995), ("gateway", (), 0.995), ("scheduler", ("--schedulers", "1"), 0.97)],
    ids=["a-scheduler-of-two", "a-gateway-of-two", "the-only-scheduler"],
)
async def test_a_role_that_is_killed_every_three_seconds(
    tmp_path: Path, role: str, options: tuple[str, ...], least: float
) -> None:
    """At least so many requests succeed, counting the second try that a lost connection costs its client."""
    numbers = ("--gateways", "2", "--schedulers", "2")
    with start_stack(tmp_path / "stack", *OPTIONS, *numbers, *options) as stack:
        await stack.healthy(4)
        answers, killed = await asyncio.gather(load(stack), kill_one_every_three_seconds(stack, role))

    well, _, latest = told(f"{role} {' '.join(options)}, {killed} killed", answers)
    assert killed == 9
    assert well >= least
    assert latest <= LATEST_S
