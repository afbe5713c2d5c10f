"""The auditor holds what has only begun: one write for a request instead of two, and nothing lost by it."""

import asyncio
from typing import Any

from redis.asyncio import Redis

from eventually import eventually
from integration.auditor_bench import KEYS, accepted, auditor_for, ended, new_ids, put, running
from integration.ledger_fixtures import database_url, db, postgres_server
from ledger.requests import count_requests

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any


async def drained(client: Redis) -> bool:
    """Nothing waits and nothing is in an auditor's hands."""
    return not await client.exists(KEYS.outbox, KEYS.auditor_outbox("a1"), KEYS.auditor_outbox("a2"))


async def test_a_beginning_waits_for_its_end(client: Redis, database_url: str, db: Connection) -> None:
    """For a moment, so that both are one row, written once; others do not wait for it."""
    waiting, whole = new_ids(2)
    auditor = auditor_for(database_url, client, hold_s=60)
    async with running(auditor):
        await put(client, [accepted(waiting)], [accepted(whole), ended(whole)])
        await eventually(lambda: auditor.stats().rows_written, "what is whole is written")
        assert await count_requests(db) == {"completed": 1}
        assert await client.llen(KEYS.auditor_outbox("a1")) == 2
        assert (auditor.stats().pending, auditor.stats().last_error) == (2, None)
        await put(client, [ended(waiting)])
        await eventually(lambda: drained(client), "all is written")
        assert auditor.stats().rows_written == 2

    assert await count_requests(db) == {"completed": 2}


async def test_what_waits_for_its_end_is_adopted(client: Redis, database_url: str, db: Connection) -> None:
    """Its auditor dies with it in its hands; the next one writes it, and what was written before stays."""
    waiting, whole = new_ids(2)
    first = auditor_for(database_url, client, hold_s=60)
    task = asyncio.create_task(first.run())
    await put(client, [accepted(waiting), accepted(whole), ended(whole)])
    await eventually(lambda: first.stats().rows_written, "what is whole is written")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await client.llen(KEYS.auditor_outbox("a1")) == 1

    second = auditor_for(database_url, client, "a2")
    async with running(second):
        await eventually(lambda: drained(client), "the next has written all")

    assert await count_requests(db) == {"completed": 1, "queued": 1}


async def test_what_waits_for_its_end_is_written_at_the_stop(client: Redis, database_url: str, db: Connection) -> None:
    """Nothing is left for the next auditor."""
    (request_id,) = new_ids(1)
    auditor = auditor_for(database_url, client, hold_s=60)
    async with running(auditor):
        await put(client, [accepted(request_id)])
        await eventually(lambda: auditor.stats().pending == 1, "it is taken")

    assert await drained(client)
    assert await count_requests(db) == {"queued": 1}


async def test_what_redis_loses_meanwhile_is_written_all_the_same(
    client: Redis, database_url: str, db: Connection
) -> None:
    """The auditor may be the only one to know of it."""
    lost, new = new_ids(2)
    auditor = auditor_for(database_url, client, hold_s=60)
    async with running(auditor):
        await put(client, [accepted(lost)])
        await eventually(lambda: auditor.stats().pending == 1, "it is taken")
        await client.flushall()
        await put(client, [accepted(new), ended(new)])
        await eventually(lambda: drained(client), "all is written")

    assert await count_requests(db) == {"completed": 1, "queued": 1}
