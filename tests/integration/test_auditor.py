"""The auditor: rows, bad records, maintenance, the lock, and stopping."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from redis.asyncio import Redis

from eventually import eventually
from integration.auditor_bench import KEYS, accepted, auditor_for, drained, ended, new_ids, put, put_requests, running
from integration.ledger_fixtures import database_url, db, postgres_server
from ledger.audit.maintenance import MaintenancePolicy
from ledger.audit.queries import count_requests, find_request
from scheduler.errors import RedisUnavailable
from scheduler.protocol.audit_outbox import Outbox, Taken, decode_entry

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any


async def audit(url: str, client: Redis) -> None:
    """Run an auditor until the outbox is empty."""
    async with running(auditor_for(url, client)):
        await eventually(lambda: drained(client), "the outbox is empty")


async def test_a_request_in_one_entry_is_one_row(client: Redis, database_url: str, db: Connection) -> None:
    """Two records are folded into one row, which is found by its id."""
    (request_id,) = new_ids(1)
    await put(client, [accepted(request_id), ended(request_id)])
    await audit(database_url, client)

    row = await find_request(db, request_id)
    assert row is not None
    assert (row.status, row.http_status, row.tier, row.tokens_used) == ("completed", 200, "paid", 5)
    assert await find_request(db, new_ids(1)[0]) is None
    assert await find_request(db, "req_nonsense") is None


async def test_a_bad_record_is_set_aside_and_costs_its_batch_nothing(
    client: Redis, database_url: str, db: Connection
) -> None:
    """Records that cannot be written are set aside, and the others are written."""
    good, bad_customer, too_large, bad_text, negative = new_ids(200), *new_ids(4)
    await put(client, b"\xc1", b"\x93\x01\x02\x03")
    await put(client, [accepted("req_short")])
    await put(client, [accepted(i) for i in good[:100]], [accepted(bad_customer, customer_id="nobody")])
    await put(client, [ended(too_large, attempts=2**40), *(ended(i) for i in good)])
    await put(client, [accepted(bad_text, model="nul\x00"), *(accepted(i) for i in good[100:])])
    await put(client, [ended(negative, attempts=-1)])
    auditor = auditor_for(database_url, client)
    async with running(auditor):
        await eventually(lambda: drained(client), "the outbox is empty")

    assert await count_requests(db) == {"completed": 200}
    aside = await client.lrange(KEYS.outbox_bad, 0, -1)
    read = [record for entry in aside for record in decode_entry(entry)[0]]
    assert {record.id for record in read} == {"req_short", bad_customer, too_large, bad_text, negative}
    assert len(aside) == auditor.set_aside == 9
    assert auditor.last_refusal
    assert auditor.last_error is None


async def test_partitions_are_kept_ahead(client: Redis, database_url: str, db: Connection) -> None:
    """An active auditor creates missing partitions."""
    day = datetime.now(UTC) + timedelta(days=3)
    await db.execute(f"DROP TABLE requests_{day:%Y%m%d}")
    async with running(auditor_for(database_url, client)):

        async def is_back() -> bool:
            return bool(await db.fetchval(f"SELECT to_regclass('requests_{day:%Y%m%d}')"))

        await eventually(is_back, "the partition is back")


async def test_abandoned_requests_are_closed_when_all_is_written(
    client: Redis, database_url: str, db: Connection
) -> None:
    """Rows that are open after deadline and grace are closed as abandoned; younger and ended ones are not."""
    old, ended_one, young = new_ids(3)
    aged = "req_" + f"{int(old[4:16], 16) - 14_500:012x}" + old[16:]
    aged_ended = "req_" + f"{int(ended_one[4:16], 16) - 14_500:012x}" + ended_one[16:]
    await put(client, [accepted(aged), accepted(aged_ended), accepted(young), ended(aged_ended)])
    auditor = auditor_for(database_url, client)
    async with running(auditor):
        await eventually(lambda: auditor.maintenance.closed == 1, "the abandoned one is closed")

    row = await find_request(db, aged)
    assert row is not None
    assert (row.status, row.error_code, row.http_status) == ("failed", "abandoned", 504)
    assert row.completed_at is not None
    assert await count_requests(db) == {"failed": 1, "completed": 1, "queued": 1}


async def test_nothing_is_closed_while_entries_wait(client: Redis, database_url: str, db: Connection) -> None:
    """No row is closed before all entries are written, since its end may be among them."""
    ids = new_ids(20)
    aged = ["req_" + f"{int(i[4:16], 16) - 60_000:012x}" + i[16:] for i in ids]
    await put(client, *([accepted(i)] for i in aged))
    await put(client, *([ended(i)] for i in aged))
    auditor = auditor_for(database_url, client, take_limit=1)
    async with running(auditor):
        await eventually(lambda: drained(client), "the outbox is empty")

    assert await count_requests(db) == {"completed": 20}
    assert auditor.maintenance.closed == 0


async def test_the_last_use_of_keys_is_sampled(client: Redis, database_url: str, db: Connection) -> None:
    """The last use of a key is written from the audit, without a change of the catalog version."""
    await db.execute("INSERT INTO customers (name, tier) VALUES ('acme', 'paid')")
    key_id = (await db.fetchval("SELECT issue_api_key('acme', 'ci')"))[3:15]
    version = await db.fetchval("SELECT version FROM catalog_version")
    first, last = new_ids(2)
    await put(client, [accepted(last, api_key_id=key_id), accepted(first, api_key_id=key_id)])
    async with running(auditor_for(database_url, client, maintenance=MaintenancePolicy(last_used_every_s=0.05))):

        async def used_at() -> datetime | None:
            at: datetime | None = await db.fetchval("SELECT last_used_at FROM api_keys")
            return at

        seen = await eventually(used_at, "the last use is noted")

    row = await find_request(db, last)
    assert row is not None
    assert seen == row.created_at
    assert await db.fetchval("SELECT version FROM catalog_version") == version


async def test_only_one_auditor_is_active(client: Redis, database_url: str, db: Connection) -> None:
    """One of two auditors is active; the other takes over when it stops."""
    first, second = auditor_for(database_url, client), auditor_for(database_url, client, "a2")
    ids = new_ids(10)
    async with running(second):
        async with running(first):
            await eventually(lambda: first.active or second.active, "one is active")
            assert first.active != second.active
            standby = second if first.active else first
            await put(client, [accepted(ids[0])])
            await eventually(lambda: drained(client), "the outbox is empty")
            assert (standby.rows_written, standby.lag() < 1) == (0, True)
        await eventually(lambda: second.active, "the other takes over")
        await put_requests(client, ids)
        await eventually(lambda: drained(client), "the outbox is empty")

    assert await count_requests(db) == {"completed": 10}


async def test_stop_writes_what_waits(client: Redis, database_url: str, db: Connection) -> None:
    """A stopped auditor has written all entries and released the lock."""
    auditor = auditor_for(database_url, client, interval_s=30, take_limit=10)
    task = asyncio.create_task(auditor.run())
    await eventually(lambda: auditor.active, "it is active")
    await eventually(lambda: auditor.lag() < 30, "it has looked once")
    await put_requests(client, new_ids(1000), step=10)

    await auditor.stop(grace_s=30.0)  # A slow machine needs more than the two seconds of a role.
    await task

    assert await drained(client)
    assert await count_requests(db) == {"completed": 1000}
    assert not auditor.active
    assert await db.fetchval("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == 0


class UnansweredOnce(Outbox):
    """Once told to, Redis does not answer the next `take`."""

    fails = False

    async def take(self, limit: int, held: int = 0, newest: str = "") -> Taken:
        if self.fails:
            self.fails = False
            raise RedisUnavailable("Redis did not answer: TimeoutError")
        return await super().take(limit, held, newest)


async def test_one_unanswered_call_does_not_end_the_grace_period(
    client: Redis, database_url: str, db: Connection
) -> None:
    """An error of Redis does not end the grace period."""
    outbox = UnansweredOnce(client, KEYS, "a1")
    auditor = auditor_for(database_url, client, outbox=outbox, interval_s=30)
    task = asyncio.create_task(auditor.run())
    await eventually(lambda: auditor.active, "it is active")
    await eventually(lambda: auditor.lag() < 30, "it has looked once")
    await put_requests(client, new_ids(10), step=10)

    outbox.fails = True
    await auditor.stop(grace_s=30.0)
    await task

    assert not outbox.fails
    assert await drained(client)
    assert await count_requests(db) == {"completed": 10}


class StoppedDuringTake(Outbox):
    """While the answer to the first `take` is on its way, `meanwhile` happens."""

    meanwhile: Callable[[], Awaitable[None]] | None = None

    async def take(self, limit: int, held: int = 0, newest: str = "") -> Taken:
        taken = await super().take(limit, held, newest)
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile:
            await meanwhile()
        return taken


async def test_a_stop_during_a_look_at_the_outbox_looks_again(client: Redis, database_url: str, db: Connection) -> None:
    """Entries that arrive during a take and before the stop are written."""
    outbox = StoppedDuringTake(client, KEYS, "a1")
    auditor = auditor_for(database_url, client, outbox=outbox, interval_s=30)
    stops: list[asyncio.Task[None]] = []

    async def requests_and_stop() -> None:
        await put_requests(client, new_ids(10), step=10)
        stops.append(asyncio.create_task(auditor.stop(grace_s=30.0)))
        await asyncio.sleep(0)  # The task has begun: the auditor is told.

    outbox.meanwhile = requests_and_stop
    await auditor.run()
    await stops[0]

    assert await drained(client)
    assert await count_requests(db) == {"completed": 10}
