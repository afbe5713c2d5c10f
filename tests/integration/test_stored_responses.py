"""Stored responses in PostgreSQL: limits of a customer, conversations, ends of jobs, expiry."""

from typing import Any

import asyncpg
import pytest
from redis.asyncio import Redis

from integration.jobs_fixtures import add_customers, customer_id
from integration.ledger_fixtures import database_url, db, postgres_server
from ledger.jobs import JobEnd, NewJob, end_jobs, insert_jobs
from ledger.postgres import statement
from ledger.responses import (
    NewResponse,
    StoreLimits,
    delete_response,
    find_conversation,
    find_responses,
    insert_responses,
    purge_responses,
)
from pool import Pool
from scheduler.redis_client.keys import Keys
from scheduler.request_id import new_request_id

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any
OWNER, OTHER = customer_id("free"), customer_id("paid")
LIMITS = StoreLimits(10, 1000, 60.0)


def new(size: int = 10, owner: str = OWNER, previous: str | None = None, *, is_open: bool = False) -> NewResponse:
    """A response of so many bytes."""
    request_id = new_request_id()
    name = request_id.replace("req_", "resp_")
    return NewResponse(request_id, name, owner, previous, b"x" * size, b"", is_open)


@pytest.fixture
async def store(db: "asyncpg.Connection[asyncpg.Record]") -> Connection:
    """A connection; the customers exist."""
    await add_customers(db)
    return db


async def left(store: Connection) -> list[str]:
    return [row["id"] for row in await store.fetch("SELECT id FROM responses ORDER BY created_at, id")]


async def test_limits_of_a_customer(store: Connection) -> None:
    """Over the count or the bytes the oldest responses are deleted, never another customer's. Inserts can be repeated."""
    others = [new(900, OTHER)]
    many = [new() for _ in range(12)]
    await insert_responses(store, others, LIMITS)
    for each in many:
        await insert_responses(store, [each], LIMITS)
    assert await left(store) == [each.id for each in (*others, *many[2:])]

    large = [new(400), new(400)]
    await insert_responses(store, large, LIMITS)
    await insert_responses(store, large, LIMITS)
    assert await left(store) == [each.id for each in (*others, *many[4:], *large)]

    last = new(500)
    await insert_responses(store, [last], LIMITS)
    assert await left(store) == [each.id for each in (*others, large[1], last)]


async def test_a_deleted_response(store: Connection) -> None:
    """Its content is gone, it is not stored again, and it counts for no limit of the others."""
    deleted, kept = [new() for _ in range(12)], [new() for _ in range(10)]
    await insert_responses(store, deleted[:1], LIMITS)
    for each in deleted:
        await insert_responses(store, [each], LIMITS)
        await delete_response(store, each.id, OWNER)
    await insert_responses(store, [deleted[-1], *kept], LIMITS)
    rows = await store.fetch("SELECT id FROM responses WHERE bytes > 0 ORDER BY created_at, id")

    assert [row["id"] for row in rows] == [each.id for each in kept]
    assert (await find_responses(store, [deleted[-1].id]))[deleted[-1].id].document == b""
    assert await store.fetchval("SELECT count(*) FROM responses") <= 2 * LIMITS.max_count


async def test_conversations(store: Connection) -> None:
    """The oldest first; another customer's is unknown; a missing one, and the limits of bytes and depth, are reported."""
    first = new()
    second = new(previous=first.id)
    third = new(previous=second.id)
    await insert_responses(store, [first, second, third], LIMITS)
    whole = await find_conversation(store, third.id, OWNER, 1000)
    short = await find_conversation(store, third.id, OWNER, 15)
    unknown = await find_conversation(store, third.id, OTHER, 1000)
    deep = await store.fetch(statement("find_conversation"), third.id, OWNER, 2, 1000)
    await delete_response(store, first.id, OWNER)
    broken = await find_conversation(store, third.id, OWNER, 1000)

    assert whole is not None
    assert ([row.id for row in whole.rows], whole.whole) == ([first.id, second.id, third.id], True)
    assert short is not None
    assert (len(short.rows), short.whole, short.too_long) == (0, False, True)
    assert [(row["too_long"], row["document"]) for row in deep] == [(True, None)] * 2
    assert unknown is None
    assert broken is not None
    assert (len(broken.rows), broken.whole, broken.too_long) == (2, False, False)


async def test_the_end_of_a_job_is_stored_with_its_response(store: Connection, client: Redis) -> None:
    """In one statement, once. An open response without an open job is lost."""
    ends, lost = new(is_open=True), new(is_open=True)
    await insert_responses(store, [ends, lost], LIMITS)
    job = Pool(client, Keys()).submission(id=ends.request_id, customer_id=OWNER)
    await insert_jobs(store, [NewJob(job, 60.0)], "default")
    before = await find_responses(store, [ends.id, lost.id])
    end = JobEnd(ends.request_id, "", "out", OWNER, 12, 5, "length")
    await end_jobs(store, [end], 60.0)
    await end_jobs(store, [JobEnd(ends.request_id, "cancelled", "", OWNER)], 60.0)
    after = (await find_responses(store, [ends.id]))[ends.id]

    assert [(row.open, row.lost) for row in (before[ends.id], before[lost.id])] == [(True, False), (True, True)]
    assert (after.open, after.output, after.error_code, after.finish_reason) == (False, b"out", None, "length")
    assert (after.tokens_used, after.output_tokens) == (12, 5)
    await store.execute("UPDATE responses SET open = true WHERE id = $1", ends.id)  # As after an older version's end.
    assert (await find_responses(store, [ends.id]))[ends.id].lost
    assert await store.fetchval("SELECT bytes FROM responses WHERE id = $1", ends.id) == 13


async def test_expired_responses(store: Connection) -> None:
    """They are unknown, and deleted by the maintenance."""
    old, kept = new(), new()
    await insert_responses(store, [old], LIMITS._replace(kept_s=-1.0))
    await insert_responses(store, [kept], LIMITS)
    found = await find_responses(store, [old.id, kept.id])
    await purge_responses(store, 100)

    assert list(found) == [kept.id]
    assert await left(store) == [kept.id]
