"""Bugs of audits and catalogs over PostgreSQL: rows that are lost, doubled or torn, and keys that fail with a database."""

import re
import time
from collections.abc import Iterator
from typing import Any

import asyncpg
import pytest
from redis.asyncio import Redis

from eventually import eventually
from integration.audit_fixtures import KEYS, accepted, auditor_for, ended, new_ids, put, running
from integration.ledger_fixtures import copy_of, database_url, db, drop, dsn, postgres_server
from ledger.audit.queries import count_requests, find_request
from ledger.catalog.api_key import mint
from ledger.catalog.follower import Catalog
from ledger.catalog.loader import CHANNEL
from ledger.postgres import LEADER_SETTINGS, connect
from regressions.lint import ROOT
from scheduler.errors import ErrorCode, RequestError
from scheduler.protocol.audit_outbox import decode_entry
from tierlane.embedded.postgres import SETTINGS, EmbeddedPostgres

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any


async def nothing_waits(client: Redis) -> bool:
    return not await client.exists(KEYS.outbox, KEYS.auditor_outbox("a1"))


async def audit(url: str, client: Redis) -> None:
    """Run an auditor until the outbox is empty."""
    async with running(auditor_for(url, client)):
        await eventually(lambda: nothing_waits(client), "the outbox is empty")


async def test_bug_36_a_record_that_nobody_can_read(client: Redis, database_url: str, db: Connection) -> None:
    """One bad entry at the head stopped the drain for ever (Sidekiq #4633); here it is set aside, the rest is written."""
    good = new_ids(20)
    await put(client, b"\xc1", b"", b"\x91\x93\xa1x\x01\x02", *[[accepted(i), ended(i)] for i in good])

    await audit(database_url, client)

    assert await count_requests(db) == {"completed": 20}
    assert await client.llen(KEYS.outbox_bad) == 3


async def test_bug_43_one_duplicate_aborts_a_copy(client: Redis, database_url: str, db: Connection) -> None:
    """A COPY that meets one row twice loses all of them; here rows are staged, and those that are there already stay."""
    ids = new_ids(50)
    await put(client, [accepted(ids[0]), ended(ids[0])])
    await audit(database_url, client)
    first = await find_request(db, ids[0])

    for _ in range(2):
        await put(client, *[[accepted(i), ended(i, worker_id="w2"), ended(i)] for i in ids])
    await audit(database_url, client)

    assert await count_requests(db) == {"completed": 50}
    assert await find_request(db, ids[0]) == first


async def test_bug_43_one_refused_row_costs_only_itself(client: Redis, database_url: str, db: Connection) -> None:
    """A row that breaks a constraint took its whole batch with it; here it is found by halving, and set aside."""
    *ids, bad = new_ids(31)
    await put(
        client, [record for i in ids[:15] for record in (accepted(i), ended(i))], [accepted(bad, customer_id="x")]
    )
    await put(client, [record for i in ids[15:] for record in (accepted(i), ended(i))])

    await audit(database_url, client)

    assert await count_requests(db) == {"completed": 30}
    aside = await client.lrange(KEYS.outbox_bad, 0, -1)
    assert [record.id for entry in aside for record in decode_entry(entry)[0]] == [bad]


async def test_bug_43_one_id_with_two_times_is_two_rows(client: Redis, database_url: str, db: Connection) -> None:
    """A partition key beside the id lets one id in twice; here the time is made from the id, so both are one thing."""
    (request_id,) = new_ids(1)
    await put(client, [accepted(request_id)])
    await audit(database_url, client)
    await put(client, [accepted(request_id), ended(request_id, ended_at_ms=1)])
    await audit(database_url, client)

    rows = await db.fetch("SELECT created_at FROM requests WHERE id = $1", request_id)
    assert len(rows) == 1


async def test_bug_44_synchronous_commit_is_off(database_url: str) -> None:
    """With it off, a crash lost commits that had been answered; here nobody turns it off, nor for a server that keeps nothing."""
    connection = await connect(
        database_url,
        name="tierlane-auditor",
        connect_timeout_s=2.0,
        statement_timeout_ms=1000,
        settings=LEADER_SETTINGS,
    )
    asked = "SELECT setting, source FROM pg_settings WHERE name = 'synchronous_commit'"
    here = await connection.fetchrow(asked)
    await connection.close()

    assert tuple(here) == ("on", "default")  # The tests' own server.
    assert "synchronous_commit" not in SETTINGS
    places = [name for name, text in texts_of_the_product() if re.search(r"synchronous_commit\W+(off|local)", text)]
    assert places == []


def texts_of_the_product() -> Iterator[tuple[str, str]]:
    """Every file of ours that could say something to PostgreSQL."""
    for room in ("gateway", "scheduler", "gpu_pool", "ledger", "tierlane", "migrations"):
        for path in sorted((ROOT / room).rglob("*")):
            if path.suffix in {".py", ".sql"}:
                yield str(path.relative_to(ROOT)), path.read_text("utf-8")


async def test_bug_45_notify_on_the_hot_path(client: Redis, database_url: str, db: Connection) -> None:
    """NOTIFY makes commits wait for each other (recall.ai); here only the catalog notifies, and no audit row does."""
    heard: list[str] = []
    await db.add_listener(CHANNEL, lambda *told: heard.append(str(told[-1])))
    ids = new_ids(50)
    await put(client, *[[accepted(i), ended(i)] for i in ids])

    await audit(database_url, client)
    assert await count_requests(db) == {"completed": 50}
    assert heard == []
    assert await db.fetchval("SELECT count(*) FROM pg_trigger WHERE tgrelid = 'requests'::regclass") == 0

    await db.execute("UPDATE tiers SET burst = burst + 1 WHERE name = 'free'")
    await eventually(lambda: heard, "the catalog does")


async def test_bug_49_the_auth_cache_is_down(postgres_server: EmbeddedPostgres) -> None:
    """With its cache of keys down, an API was down for hours (OpenAI 2023); here keys are in the process, and stay good."""
    url = await copy_of(postgres_server, "migrated")
    db = await asyncpg.connect(dsn(url))
    await db.execute("INSERT INTO customers (name, tier) VALUES ('acme', 'paid')")
    known: str = await db.fetchval("SELECT issue_api_key('acme', 'ci')")
    await db.close()
    offset_s = 0.0
    catalog = Catalog(url, clock=lambda: time.monotonic() + offset_s)
    await catalog.start()
    await drop(postgres_server, url)
    await eventually(lambda: catalog.problem, "the loss is noticed")

    offset_s = 10 * 60.0
    assert catalog.identify(known, time.time()).tier == "paid"
    with pytest.raises(RequestError) as unknown:
        catalog.identify(mint().text, time.time())

    assert unknown.value.code is ErrorCode.CATALOG_UNAVAILABLE
    await catalog.stop()
