"""Redis is stopped, killed, emptied, or fails over under load: every request has its response in time, and its audit row."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import aiohttp
import asyncpg
import pytest

from eventually import eventually
from gateway.inference.recovery.recent_outcomes import KEEP_S
from integration.sentinel_fixtures import Failover, failover
from ledger.postgres import asyncpg_dsn
from load import ALL_WELL, Answer, ask, load, one_row_each, verdict
from scheduler.redis_client.connections import command_client
from stack import Stack, start_stack

__all__ = ["failover"]

TIERS = ("enterprise", "paid", "free")
RATE = 90.0
SECONDS = 9.0
FAULT_AT_S = 2.0
STOPPED_S = 3.0
DETECTED_S = 0.7  # Half a second, and the delay of a busy machine.
REJECTED = {"rate_limit_exceeded", "reduced_capacity", "queue_full", "shed_for_priority", "no_capacity", "backpressure"}


class Timed(NamedTuple):
    """One answer, and when its request was sent and answered, in seconds from the fault."""

    answer: Answer
    sent: float
    came: float


async def under_load(stack: Stack, fault: Callable[[], Awaitable[None]]) -> list[Timed]:
    """Load in three tiers for nine seconds, with the fault after two."""
    url, keys = stack.url, {tier: stack.key(tier) for tier in TIERS}
    began = time.monotonic()
    fault_at = began + FAULT_AT_S

    async def one(session: aiohttp.ClientSession, tier: str) -> Timed:
        sent = time.monotonic()
        answer = await ask(session, stack, tier, keys[tier], url)
        return Timed(answer, sent - fault_at, time.monotonic() - fault_at)

    async def inject() -> None:
        await asyncio.sleep(max(0.0, fault_at - time.monotonic()))
        await fault()

    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=10)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        injecting = asyncio.create_task(inject())
        tasks = []
        for i in range(int(RATE * SECONDS)):
            await asyncio.sleep(max(0.0, began + i / RATE - time.monotonic()))
            tasks.append(asyncio.create_task(one(session, TIERS[i % len(TIERS)])))
        results = list(await asyncio.gather(*tasks))
        await injecting
    return results


async def check(stack: Stack, results: list[Timed]) -> dict[str, asyncpg.Record]:
    """One response each, in time and right; one row for each accepted request, with the result that its client got."""
    answers = [each.answer for each in results]
    wrong = verdict(answers)
    assert [kind for kind in ("unanswered", "duplicated", "crossed", "late") if wrong[kind]] == []
    await eventually(lambda: not list(stack.data_dir.glob("*/spool/*.log*")), "the spools are merged", 20.0)
    status = {answer.request_id or "": answer.status for answer in answers}
    accepted = [answer.request_id or "" for answer in answers if answer.code not in REJECTED]
    rows = await stack.audited(accepted)
    assert {i: row["http_status"] for i, row in rows.items()} == {i: status[i] for i in accepted}
    rejected = await stack.rows([i for i in status if i not in rows])
    # If it was not known whether Redis had accepted a request, the request was ended there as its client was told.
    assert {row["status"] for found in rejected.values() for row in found} <= {"failed"}
    return rows


@pytest.mark.alone
async def test_redis_is_stopped_for_three_seconds(simulated: Stack) -> None:
    """Enterprise is served within a second and from then on, in direct mode, and the rows say so."""
    pids = await simulated.primaries()

    async def stop() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(STOPPED_S)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    results = await under_load(simulated, stop)
    rows = await check(simulated, results)

    enterprise = [each for each in results if each.answer.tier == "enterprise" and 0 <= each.sent < STOPPED_S]
    assert {each.answer.status for each in enterprise} == {200}
    assert [each for each in enterprise if each.came > max(1.0, each.sent + 0.5)] == []
    direct = [each for each in results if DETECTED_S < each.sent < STOPPED_S and each.answer.status == 200]
    assert len(direct) > 100
    assert {rows[each.answer.request_id or ""]["mode"] for each in direct} == {"direct"}


async def test_redis_is_killed_with_its_data(simulated: Stack) -> None:
    """A new, empty one is started: no accepted request is lost, and enterprise is served all the time."""
    pids = await simulated.primaries()

    async def kill() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    results = await under_load(simulated, kill)
    await check(simulated, results)

    enterprise = [each for each in results if each.answer.tier == "enterprise" and each.sent >= 0]
    assert {each.answer.status for each in enterprise} == {200}
    assert [each for each in enterprise if each.came > max(1.0, each.sent + 1.0)] == []


async def flush(stack: Stack) -> None:
    """Empty the server of every cell."""
    for url in stack.cells.values():
        client = command_client(url)
        await client.flushall()
        await client.aclose()


async def test_redis_is_emptied(simulated: Stack) -> None:
    """FLUSHALL three times at 200 requests/s: every request is completed and has one row."""
    loading = asyncio.create_task(load(simulated, 200, 5.0, TIERS))
    for _ in range(3):
        await asyncio.sleep(1.3)
        await flush(simulated)
    answers = await loading

    assert verdict(answers) == ALL_WELL
    await one_row_each(simulated, answers)


@pytest.mark.timeout(90)
async def test_redis_is_emptied_while_postgresql_is_not_written(simulated: Stack) -> None:
    """For longer than a gateway keeps records that are written: it still has those of requests that ended before."""
    writer = await asyncpg.connect(asyncpg_dsn(simulated.info.database_url))
    lock = writer.transaction()
    await lock.start()
    await writer.execute("LOCK TABLE requests")
    answers = await load(simulated, 50, 2.0, TIERS)
    await asyncio.sleep(KEEP_S + 3.0)
    await flush(simulated)
    await lock.rollback()
    await writer.close()

    assert verdict(answers) == ALL_WELL
    await one_row_each(simulated, answers)


@pytest.mark.timeout(90)
async def test_the_primary_behind_sentinel_dies(failover: Failover, tmp_path: Path) -> None:
    """The replica takes over without the last writes: every request is completed and has one row."""
    options = ("--backend", "simulated:50", "--workers", "2")
    environment = {"TIERLANE_REDIS_URL": failover.url}
    with start_stack(tmp_path / "stack", *options, environment=environment) as stack:
        await stack.healthy(2)
        loading = asyncio.create_task(load(stack, 100, 8.0, TIERS))
        await asyncio.sleep(2.0)
        failover.kill_primary()
        answers = await loading

        assert verdict(answers) == ALL_WELL
        await one_row_each(stack, answers)
        await stack.healthy(2)
