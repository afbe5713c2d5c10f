"""Redis stands still, or dies with all that it held, under load: everybody is answered in time, and the audit is whole."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import aiohttp
import asyncpg

from eventually import eventually
from gateway.direct.spool import from_line
from load import Answer, ask
from scheduler.request_id import created_ms
from stack import Stack, start_stack

TIERS = ("enterprise", "paid", "free")
RATE = 90.0
SECONDS = 9.0
FAULT_AT_S = 2.0
STOPPED_S = 3.0
DETECTED_S = 0.7  # Half a second, and what a busy machine adds.
REFUSED = {"rate_limit_exceeded", "reduced_capacity", "queue_full", "shed_for_priority", "no_capacity", "backpressure"}


class Told(NamedTuple):
    """One answer, and when its request was sent and it came, in seconds from the fault."""

    answer: Answer
    sent: float
    came: float


async def under_load(stack: Stack, fault: Callable[[], Awaitable[None]]) -> list[Told]:
    """Load in three tiers for nine seconds, with the fault after two."""
    url, keys = stack.url, {tier: stack.key(tier) for tier in TIERS}
    began = time.monotonic()
    fault_at = began + FAULT_AT_S

    async def one(session: aiohttp.ClientSession, tier: str) -> Told:
        sent = time.monotonic()
        answer = await ask(session, stack, tier, keys[tier], url)
        return Told(answer, sent - fault_at, time.monotonic() - fault_at)

    async def strike() -> None:
        await asyncio.sleep(max(0.0, fault_at - time.monotonic()))
        await fault()

    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=10)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        striking = asyncio.create_task(strike())
        asked = []
        for i in range(int(RATE * SECONDS)):
            await asyncio.sleep(max(0.0, began + i / RATE - time.monotonic()))
            asked.append(asyncio.create_task(one(session, TIERS[i % len(TIERS)])))
        told = list(await asyncio.gather(*asked))
        await striking
    return told


def laws(told: list[Told]) -> None:
    """Everybody is answered once, in time, with an output that is his own."""
    answers = [each.answer for each in told]
    ids = [answer.request_id for answer in answers]
    assert None not in ids
    assert len(set(ids)) == len(ids)
    assert [answer for answer in answers if answer.seconds > 4.1] == []
    assert [answer for answer in answers if answer.status == 200 and not answer.echoed] == []


async def audit(stack: Stack, told: list[Told]) -> dict[str, asyncpg.Record]:
    """One row for each accepted request, which says what its client was told."""
    status = {each.answer.request_id or "": each.answer.status for each in told}
    accepted = [each.answer.request_id or "" for each in told if each.answer.code not in REFUSED]
    rows = await stack.audited(accepted)
    assert {i: row["http_status"] for i, row in rows.items()} == {i: status[i] for i in accepted}
    refused = await stack.rows([i for i in status if i not in rows])
    # Whether Redis let it in was not known when it was refused: then it was ended there with what the client was told.
    assert {row["status"] for found in refused.values() for row in found} <= {"failed"}
    return rows


async def spools(stack: Stack) -> list[str]:
    return [str(path) for path in stack.data_dir.glob("*/spool/*.log*")]


async def merged(stack: Stack) -> None:
    async def empty() -> bool:
        return not await spools(stack)

    await eventually(empty, "the spools are merged", 20.0)


async def test_three_seconds_of_standstill(simulated: Stack) -> None:
    """SIGSTOP: enterprise is served within a second of it and on, past Redis; afterwards the audit knows it all."""
    (pid,) = simulated.pids("redis").values()

    async def stop() -> None:
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(STOPPED_S)
        os.kill(pid, signal.SIGCONT)

    told = await under_load(simulated, stop)
    await merged(simulated)
    rows = await audit(simulated, told)

    laws(told)
    enterprise = [each for each in told if each.answer.tier == "enterprise" and 0 <= each.sent < STOPPED_S]
    assert {each.answer.status for each in enterprise} == {200}
    assert [each for each in enterprise if each.came > max(1.0, each.sent + 0.5)] == []
    past_redis = [each for each in told if DETECTED_S < each.sent < STOPPED_S and each.answer.status == 200]
    assert len(past_redis) > 100
    assert {rows[each.answer.request_id or ""]["mode"] for each in past_redis} == {"direct"}


async def test_a_redis_that_dies_with_all_it_held(simulated: Stack) -> None:
    """SIGKILL, and a new one that is empty: nothing accepted is lost, and enterprise is served all the time."""
    (pid,) = simulated.pids("redis").values()

    async def kill() -> None:
        os.kill(pid, signal.SIGKILL)

    told = await under_load(simulated, kill)
    await merged(simulated)
    await audit(simulated, told)

    laws(told)
    enterprise = [each for each in told if each.answer.tier == "enterprise" and each.sent >= 0]
    assert {each.answer.status for each in enterprise} == {200}
    assert [each for each in enterprise if each.came > max(1.0, each.sent + 1.0)] == []


async def test_what_a_killed_gateway_had_sent_past_redis_is_in_the_audit(tmp_path: Path) -> None:
    """SIGKILL while a worker runs it: nobody was answered; the beginning is on the disk, is merged, and is closed."""
    options = ("--backend", "simulated:700", "--workers", "1", "--gateways", "1")
    with start_stack(tmp_path / "stack", *options, environment={"TIERLANE_AUDIT_GRACE_MS": "1000"}) as stack:
        await stack.healthy(1)
        ((redis,), (gateway,)) = (stack.pids(role).values() for role in ("redis", "gateway"))
        key, url = stack.key("enterprise"), stack.url
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
            os.kill(redis, signal.SIGSTOP)
            try:
                first = await ask(session, stack, "enterprise", key, url)  # From here on Redis is not asked any more.
                asking = asyncio.create_task(ask(session, stack, "enterprise", key, url))
                await eventually(lambda: on_disk(stack), "its beginning is on the disk")
                os.kill(gateway, signal.SIGKILL)
                begun = on_disk(stack)
            finally:
                os.kill(redis, signal.SIGCONT)
            killed = await asking
        await merged(stack)
        rows = await stack.audited([first.request_id or "", *begun])

    assert (first.status, killed.status, len(begun)) == (200, 0, 1)
    assert rows[first.request_id or ""]["status"] == "completed"
    row = rows[begun[0]]
    assert (row["status"], row["error_code"], row["tier"]) == ("failed", "abandoned", "enterprise")
    assert row["completed_at"].timestamp() * 1000 >= created_ms(begun[0]) + 4000


def on_disk(stack: Stack) -> list[str]:
    """The requests in the spools that have no end there."""
    lines = [line for path in stack.data_dir.glob("*/spool/*.log*") for line in path.read_bytes().splitlines(True)]
    notes = [note for note in map(from_line, lines) if note]
    ended = {end.id for _, end in notes if end}
    return [accepted.id for accepted, _ in notes if accepted.id not in ended]
