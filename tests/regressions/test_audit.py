"""Bugs of audits and catalogs in PostgreSQL: lost, duplicate or partial rows, and authentication without a database."""

import re
import time
from collections.abc import Iterator
from typing import Any

import asyncpg
import pytest
from redis.asyncio import Redis

from distributions import FOLDERS, ROOT
from eventually import eventually
from integration.audit_fixtures import KEYS, accepted, auditor_for, count_requests, ended, new_ids, put, running
from integration.ledger_fixtures import copy_of, database_url, db, drop, dsn, postgres_server
from ledger.audit.queries import find_request
from ledger.catalog.api_key import mint
from ledger.catalog.follower import Catalog
from ledger.catalog.loader import CHANNEL
from ledger.postgres import LEADER_SETTINGS, connect
from scheduler.errors import ErrorCode, RequestError
from scheduler.protocol.audit_records import decode_entry
from tierlane_local.embedded.postgres import SETTINGS, EmbeddedPostgres

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any


async def outbox_is_empty(client: Redis) -> bool:
    return not await client.exists(KEYS.outbox, KEYS.auditor_outbox("a1"))


async def audit(url: str, client: Redis) -> None:
    """Run an auditor until the outbox is empty."""
    async with running(auditor_for(url, client)):
        await eventually(lambda: outbox_is_empty(client), "the outbox is empty")


async def test_bug_36_an_unreadable_entry_stops_no_audit(client: Redis, database_url: str, db: Connection) -> None:
    """One bad entry at the head blocked all others (Sidekiq #4633). Here it is stored separately, and the others are written."""
    good = new_ids(20)
    await put(client, b"\xc1", b"", b"\x91\x93\xa1x\x01\x02", *[[accepted(i), ended(i)] for i in good])

    await audit(database_url, client)

    assert await count_requests(db) == {"completed": 20}
    assert await client.llen(KEYS.outbox_bad) == 3


async def test_bug_43_a_duplicate_row_aborts_no_copy(client: Redis, database_url: str, db: Connection) -> None:
    """A COPY with a duplicate row loses all rows. Here rows are staged, and existing ones stay."""
    ids = new_ids(50)
    await put(client, [accepted(ids[0]), ended(ids[0])])
    await audit(database_url, client)
    first = await find_request(db, ids[0])

    for _ in range(2):
        await put(client, *[[accepted(i), ended(i, worker_id="w2"), ended(i)] for i in ids])
    await audit(database_url, client)

    assert await count_requests(db) == {"completed": 50}
    assert await find_request(db, ids[0]) == first


async def test_bug_43_a_bad_row_does_not_affect_others(client: Redis, database_url: str, db: Connection) -> None:
    """A row that violates a constraint fails its whole batch. Here it is found by bisection and stored separately."""
    *ids, bad = new_ids(31)
    await put(
        client, [record for i in ids[:15] for record in (accepted(i), ended(i))], [accepted(bad, customer_id="x")]
    )
    await put(client, [record for i in ids[15:] for record in (accepted(i), ended(i))])

    await audit(database_url, client)

    assert await count_requests(db) == {"completed": 30}
    entries = await client.lrange(KEYS.outbox_bad, 0, -1)
    assert [record.id for entry in entries for record in decode_entry(entry)[0]] == [bad]


async def test_bug_43_one_id_has_one_row(client: Redis, database_url: str, db: Connection) -> None:
    """With a partition key next to the id, one id can have two rows. Here the time is derived from the id."""
    (request_id,) = new_ids(1)
    await put(client, [accepted(request_id)])
    await audit(database_url, client)
    await put(client, [accepted(request_id), ended(request_id, ended_at_ms=1)])
    await audit(database_url, client)

    rows = await db.fetch("SELECT created_at FROM requests WHERE id = $1", request_id)
    assert len(rows) == 1


async def test_bug_44_synchronous_commit_is_on(database_url: str) -> None:
    """With it off, a crash loses acknowledged commits. Here no setting and no statement turns it off."""
    connection = await connect(
        database_url,
        name="tierlane-auditor",
        connect_timeout_s=2.0,
        statement_timeout_ms=1000,
        settings=LEADER_SETTINGS,
    )
    query = "SELECT setting, source FROM pg_settings WHERE name = 'synchronous_commit'"
    setting = await connection.fetchrow(query)
    await connection.close()

    assert tuple(setting) == ("on", "default")
    assert "synchronous_commit" not in SETTINGS
    places = [name for name, text in product_texts() if re.search(r"synchronous_commit\W+(off|local)", text)]
    assert places == []


def product_texts() -> Iterator[tuple[str, str]]:
    """Every product file with Python or SQL."""
    for folder in (*FOLDERS.values(), ROOT / "migrations"):
        for path in sorted(folder.rglob("*")):
            if path.suffix in {".py", ".sql"}:
                yield str(path.relative_to(ROOT)), path.read_text("utf-8")


async def test_bug_45_audit_rows_send_no_notify(client: Redis, database_url: str, db: Connection) -> None:
    """NOTIFY serializes commits (recall.ai). Here only changes of the catalog notify."""
    notifications: list[str] = []
    await db.add_listener(CHANNEL, lambda *arguments: notifications.append(str(arguments[-1])))
    ids = new_ids(50)
    await put(client, *[[accepted(i), ended(i)] for i in ids])

    await audit(database_url, client)
    assert await count_requests(db) == {"completed": 50}
    assert notifications == []
    assert await db.fetchval("SELECT count(*) FROM pg_trigger WHERE tgrelid = 'requests'::regclass") == 0

    await db.execute("UPDATE tiers SET burst = burst + 1 WHERE name = 'free'")
    await eventually(lambda: notifications, "the notification of the catalog")


async def test_bug_49_keys_are_valid_without_the_database(postgres_server: EmbeddedPostgres) -> None:
    """An API was unavailable for hours with its cache of keys (OpenAI 2023). Here keys are in the process, and stay valid."""
    url = await copy_of(postgres_server, "migrated")
    db = await asyncpg.connect(dsn(url))
    await db.execute("INSERT INTO customers (name, tier) VALUES ('acme', 'paid')")
    known: str = await db.fetchval("SELECT issue_api_key('acme', 'ci')")
    await db.close()
    offset_s = 0.0
    catalog = Catalog(url, clock=lambda: time.monotonic() + offset_s)
    await catalog.start()
    await drop(postgres_server, url)
    await eventually(lambda: catalog.problem, "the loss is detected")

    offset_s = 10 * 60.0
    assert catalog.identify(known, time.time()).tier == "paid"
    with pytest.raises(RequestError) as unknown:
        catalog.identify(mint().text, time.time())

    assert unknown.value.code is ErrorCode.CATALOG_UNAVAILABLE
    await catalog.stop()
