"""The auditor: rows of records in every order, dead letters, maintenance, the lock, stopping, and held requests."""

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import product
from typing import Any

import pytest
from redis.asyncio import Redis

from eventually import eventually
from integration.audit_fixtures import (
    CUSTOMER,
    KEYS,
    accepted,
    audit,
    auditor_for,
    count_requests,
    dead,
    drained,
    ended,
    new_ids,
    put,
    put_requests,
    running,
)
from integration.ledger_fixtures import database_url, db, postgres_server
from ledger.audit import writer
from ledger.audit.folding import Folded
from ledger.audit.maintenance import MaintenancePolicy
from ledger.audit.queries import find_request
from ledger.audit.window import HoldPolicy
from ledger.audit.writer import make_batch
from scheduler.errors import RedisUnavailable
from scheduler.protocol.audit_outbox import Outbox, Taken
from scheduler.protocol.audit_records import Record, decode_entry
from scheduler.redis_client.keys import Keys
from tierlane_local.embedded.postgres import EmbeddedPostgres

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any
DEEP = HoldPolicy(hold_s=0.02, deep_s=60, deep_open=10)
SECOND = Keys("second")
CLOSING = MaintenancePolicy(close_every_s=0.05)
MODEL = (
    "INSERT INTO models (name, pool, max_batch_size, max_wait_ms, rps_per_gpu, target_utilization, "
    "enabled) VALUES ($1, $2, 8, 40, 50, 0.9, true)"
)
# An auditor that holds many open requests and prints when the completed ones are committed.
HOLDS = """
import asyncio, sys
from ledger.audit.window import HoldPolicy
from ledger.audit.auditor import Auditor, AuditPolicy
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import Keys
from scheduler.protocol.audit_outbox import Outbox

async def main(database, redis):
    outbox = Outbox(command_client(redis), Keys(), "killed")
    hold = HoldPolicy(hold_s=0.02, deep_s=60, deep_open=10)
    auditor = Auditor(database, outbox, AuditPolicy(take_limit=20, interval_s=0.05, hold=hold))
    running = asyncio.create_task(auditor.run())
    while auditor.rows_written < 10 or auditor.lag() > 0.2:
        await asyncio.sleep(0.01)
    print("holds", flush=True)
    await running

asyncio.run(main(*sys.argv[1:]))
"""
FAILED: dict[str, Any] = {"state": "failed", "error_code": "worker_lost"}
DELIVERED: dict[str, Any] = {"mode": "direct", "delivered": True}
# Each kind of end is identified by its batch. `delivered` ends were sent to the client.
ENDS: dict[str, dict[str, Any]] = {
    "failed": FAILED | {"batch_id": "failed"},
    "completed": {"batch_id": "completed"},
    "delivered": DELIVERED | {"batch_id": "delivered"},
    "delivered failure": DELIVERED | FAILED | {"batch_id": "delivered failure"},
    "delivered timeout": DELIVERED
    | {"state": "failed", "error_code": "deadline_exceeded", "batch_id": "delivered timeout"},
}
# The first end is kept, but an end that was sent to the client replaces a different one that was not, and a 504 that was
# sent replaces a result that was recorded as sent.
REPLACED_BY = {
    "failed": ("delivered timeout", "delivered"),
    "completed": ("delivered timeout", "delivered failure"),
    "delivered": ("delivered timeout",),
}


async def test_bad_records_are_set_aside_alone(client: Redis, database_url: str, db: Connection) -> None:
    """Records that cannot be decoded or written are set aside; the others of their entries are written."""
    good, bad_customer, too_large, bad_text, negative = new_ids(200), *new_ids(4)
    await put(client, b"\xc1", b"\x93\x01\x02\x03")
    await put(client, [accepted("req_short")])
    await put(client, [accepted(i) for i in good[:100]], [accepted(bad_customer, customer_id="nobody")])
    await put(client, [ended(too_large, attempts=2**40), *(ended(i) for i in good)])
    await put(client, [accepted(bad_text, model="nul\x00"), *(accepted(i) for i in good[100:])])
    await put(client, [ended(negative, attempts=-1)])
    auditor = await audit(database_url, client)

    assert await count_requests(db) == {"completed": 200}
    entries = await client.lrange(KEYS.outbox_bad, 0, -1)
    ids = {record.id for entry in entries for record in decode_entry(entry)[0]}
    assert ids == {"req_short", bad_customer, too_large, bad_text, negative}
    assert len(entries) == auditor.set_aside == 9
    assert auditor.last_rejection
    assert auditor.last_error is None


async def test_abandoned_requests_are_closed(client: Redis, database_url: str, db: Connection) -> None:
    """Rows that are open after deadline and grace are closed as abandoned; younger and ended rows are not."""
    (old, ended_one), (young,) = new_ids(2, age_ms=14_500), new_ids(1)
    await put(client, [accepted(old), accepted(ended_one), accepted(young), ended(ended_one)])
    auditor = auditor_for(database_url, client, maintenance=CLOSING)
    async with running(auditor):
        await eventually(lambda: auditor.maintenance.closed == 1, "the abandoned request is closed")

    row = await find_request(db, old)
    assert row is not None
    assert (row.status, row.error_code, row.http_status) == ("failed", "abandoned", 504)
    assert row.completed_at is not None
    assert await count_requests(db) == {"failed": 1, "completed": 1, "queued": 1}


async def test_no_request_is_closed_while_entries_wait(client: Redis, database_url: str, db: Connection) -> None:
    """The end of an open request may be among the entries that are not yet written."""
    ids = new_ids(20, age_ms=60_000)
    await put(client, *([accepted(i)] for i in ids), *([ended(i)] for i in ids))
    auditor = await audit(database_url, client, take_limit=1)

    assert await count_requests(db) == {"completed": 20}
    assert auditor.maintenance.closed == 0


async def test_the_last_use_of_a_key_is_written(client: Redis, database_url: str, db: Connection) -> None:
    """The time comes from the newest request of the key, and the catalog version does not change. An auditor that stops
    writes the uses that were not due yet.
    """
    await db.execute("INSERT INTO customers (name, tier) VALUES ('acme', 'paid')")
    key_id = (await db.fetchval("SELECT issue_api_key('acme', 'ci')"))[3:15]
    version = await db.fetchval("SELECT version FROM catalog_version")
    first, last = new_ids(2)
    await put(client, [accepted(last, api_key_id=key_id), accepted(first, api_key_id=key_id)])
    async with running(auditor_for(database_url, client, maintenance=MaintenancePolicy(last_used_every_s=0.05))):
        used_at = await eventually(lambda: db.fetchval("SELECT last_used_at FROM api_keys"), "the use is written")

    row = await find_request(db, last)
    assert row is not None
    assert used_at == row.created_at
    (newest,) = new_ids(1)
    await put(client, [accepted(newest, api_key_id=key_id)])
    async with running(auditor_for(database_url, client, maintenance=MaintenancePolicy(last_used_every_s=3600.0))):
        row = await eventually(lambda: find_request(db, newest), "the row is written")
    assert await db.fetchval("SELECT last_used_at FROM api_keys") == row.created_at
    assert await db.fetchval("SELECT version FROM catalog_version") == version


async def test_one_auditor_of_a_pool_is_active(client: Redis, database_url: str, db: Connection) -> None:
    """The standby auditor writes nothing and has no lag; it takes over when the active one stops."""
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


async def test_each_pool_has_its_own_auditor(client: Redis, database_url: str, db: Connection) -> None:
    """Auditors of two pools are active together; each closes the rows of its own models, and those of deleted models."""
    await db.execute(MODEL, "mine", "default")
    await db.execute(MODEL, "theirs", "second")
    ids = new_ids(3, age_ms=60_000)
    await put(client, *([accepted(i, model=m)] for i, m in zip(ids, ("mine", "theirs", "deleted"), strict=True)))
    auditor = auditor_for(database_url, client, maintenance=CLOSING)
    async with running(auditor):
        await eventually(lambda: auditor.maintenance.closed == 2, "two are closed")
        rows = [await find_request(db, each) for each in ids]
        assert [row.error_code for row in rows if row] == ["abandoned", None, "abandoned"]
        async with running(
            auditor_for(database_url, client, outbox=Outbox(client, SECOND, "a2"), pool="second")
        ) as other:
            await eventually(lambda: other.maintenance.closed == 1, "the third is closed")
            assert auditor.active


class HookedOutbox(Outbox):
    """Calls `before` and `after` once, around the next `take`."""

    before: Callable[[], None] | None = None
    after: Callable[[], Awaitable[None]] | None = None

    async def take(self, limit: int, held: int = 0, newest: str = "") -> Taken:
        before, self.before = self.before, None
        if before:
            before()
        taken = await super().take(limit, held, newest)
        after, self.after = self.after, None
        if after:
            await after()
        return taken


async def test_stop_writes_what_waits(client: Redis, database_url: str, db: Connection) -> None:
    """A stopped auditor has written all entries, also held requests, and has released its lock.

    A call that fails in Redis does not end the grace period.
    """
    outbox = HookedOutbox(client, KEYS, "a1")
    auditor = auditor_for(database_url, client, outbox=outbox, interval_s=30, take_limit=10, hold=HoldPolicy(hold_s=60))
    task = asyncio.create_task(auditor.run())
    await eventually(lambda: auditor.active and auditor.lag() < 30, "it has read the outbox once")
    await put(client, [accepted(new_ids(1)[0])])
    await put_requests(client, new_ids(1000), step=10)

    def fails() -> None:
        raise RedisUnavailable("Redis did not answer: TimeoutError")

    outbox.before = fails
    await auditor.stop(grace_s=30.0)  # A slow machine needs more than the two seconds of a role.
    await task

    assert outbox.before is None
    assert await drained(client)
    assert await count_requests(db) == {"completed": 1000, "queued": 1}
    assert not auditor.active
    assert await db.fetchval("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == 0


async def test_entries_that_arrive_during_the_stop_are_written(
    client: Redis, database_url: str, db: Connection
) -> None:
    """A regression: entries that arrived while a take was under way, and before the stop, were left."""
    outbox = HookedOutbox(client, KEYS, "a1")
    auditor = auditor_for(database_url, client, outbox=outbox, interval_s=30)
    stops: list[asyncio.Task[None]] = []

    async def arrive_and_stop() -> None:
        await put_requests(client, new_ids(10), step=10)
        stops.append(asyncio.create_task(auditor.stop(grace_s=30.0)))
        await asyncio.sleep(0)  # The task has begun.

    outbox.after = arrive_and_stop
    await auditor.run()
    await stops[0]

    assert await drained(client)
    assert await count_requests(db) == {"completed": 10}


async def test_a_killed_auditor_is_replaced(client: Redis, redis_url: str, database_url: str, db: Connection) -> None:
    """After SIGKILL its lock is released; the next auditor writes its entries again, committed or held, once each."""
    ids, complete = new_ids(100), new_ids(10)
    await put(client, *([accepted(i)] for i in ids), *([accepted(i), ended(i)] for i in complete))
    killed = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDS, database_url, redis_url, stdout=subprocess.PIPE
    )
    assert killed.stdout is not None
    assert await killed.stdout.readline() == b"holds\n"
    assert await count_requests(db) == {"completed": 10}
    assert await client.llen(KEYS.auditor_outbox("killed")) == 110

    auditor = auditor_for(database_url, client, hold=DEEP, take_limit=20)
    async with running(auditor):
        await eventually(lambda: auditor.lag() < 0.5, "the next auditor is on standby")
        assert not auditor.active
        killed.kill()
        await killed.wait()
        await put(client, *([ended(i)] for i in ids))
        await eventually(lambda: drained(client), "the next auditor has written all")

    assert await count_requests(db) == {"completed": 110}


def sequences() -> Iterator[tuple[str, ...]]:
    """Every order of up to three records, with repeats; of three, only those with one kind of delivered end."""
    for length in (1, 2, 3):
        for kinds in product(("accepted", *ENDS), repeat=length):
            if length < 3 or "delivered failure" not in kinds or not {"delivered", "delivered timeout"} & set(kinds):
                yield kinds


def splits(kinds: Sequence[str]) -> Iterator[list[Sequence[str]]]:
    """Every way to divide a sequence into transactions."""
    for cuts in product((False, True), repeat=len(kinds) - 1):
        parts: list[list[str]] = [[kinds[0]]]
        for cut, kind in zip(cuts, kinds[1:], strict=True):
            if cut:
                parts.append([kind])
            else:
                parts[-1].append(kind)
        yield list(parts)


def recorded_end(kinds: Sequence[str]) -> str | None:
    ends = [kind for kind in kinds if kind != "accepted"]
    return next((other for other in REPLACED_BY.get(ends[0], ()) if other in ends), ends[0]) if ends else None


def record(kind: str, request_id: str) -> Record:
    return accepted(request_id) if kind == "accepted" else ended(request_id, **ENDS[kind])


async def write(db: Connection, records: Sequence[Record]) -> None:
    """Write records as the auditor does."""
    batch = await make_batch(Folded(records))
    assert await writer.write_rows(db, batch.new, 10.0, new=True) == []
    for rows in (batch.known, batch.later):
        assert await writer.write_rows(db, rows, 10.0) == []


async def test_every_order_and_split_gives_the_same_row(db: Connection) -> None:
    """Each order and split of records gives one row, with all fields of the end that the rule selects."""
    cases = [(kinds, parts) for kinds in sequences() for parts in splits(kinds)]
    ids = new_ids(len(cases))
    await writer.prepare(db)
    for turn in (0, 1, 2):
        await write(
            db,
            [
                record(kind, request_id)
                for request_id, (_, parts) in zip(ids, cases, strict=True)
                for kind in (parts[turn] if turn < len(parts) else ())
            ],
        )

    columns = "id, tier, endpoint, status, error_code, http_status, batch_id, mode, delivered"
    rows = await db.fetch(f"SELECT {columns} FROM requests")
    found = {row["id"]: tuple(row)[1:] for row in rows}
    assert len(rows) == len(cases) > 300
    wrong = {}
    for request_id, (kinds, parts) in zip(ids, cases, strict=True):
        kind = recorded_end(kinds)
        end = ENDS[kind] if kind else {}
        failed = "error_code" in end
        expected = (
            "paid" if "accepted" in kinds else None,
            "/v1/messages" if "accepted" in kinds else None,
            "queued" if kind is None else "failed" if failed else "completed",
            end.get("error_code"),
            None if kind is None else 504 if kind == "delivered timeout" else 503 if failed else 200,
            kind,
            None if kind is None else end.get("mode", "queue"),
            None if kind is None else end.get("delivered", False),
        )
        if found[request_id] != expected:
            wrong[str(parts)] = found[request_id]
    assert wrong == {}


@pytest.mark.parametrize("kind", ENDS)
async def test_a_recorded_end_replaces_abandoned(db: Connection, kind: str) -> None:
    """`abandoned` is a guess: any end replaces it, and a second end does not replace the first."""
    (request_id,) = new_ids(1)
    await writer.prepare(db)
    await write(db, [accepted(request_id)])
    await db.execute("UPDATE requests SET status = 'failed', error_code = 'abandoned', http_status = 504")
    await write(db, [accepted(request_id)])
    assert await db.fetchval("SELECT error_code FROM requests") == "abandoned"

    await write(db, [record(kind, request_id)])
    await write(db, [record("failed", request_id)])

    assert await db.fetchval("SELECT batch_id FROM requests") == kind


async def test_a_dead_letter_is_written_once(client: Redis, database_url: str, db: Connection) -> None:
    """It is written with its body, however often its record arrives, and also without the records of its request."""
    request_id, alone = new_ids(2)
    records = [ended(request_id, **ENDS["failed"]), dead(request_id, input_="a secret")]
    await put(client, [accepted(request_id)], records, records, [dead(request_id, error_code="poison_request")])
    await put(client, [dead(alone)])
    await audit(database_url, client)

    row, other = await db.fetch(
        "SELECT *, dead_at > now() - interval '10 s' AS is_new FROM dead_letters ORDER BY request_id = $1", alone
    )
    assert (row["request_id"], str(row["customer_id"]), row["tier"]) == (request_id, CUSTOMER, "paid")
    assert (row["model"], row["error_code"], row["attempts"]) == ("tiny", "worker_lost", 3)
    assert row["worker_ids"] == ["w1", "w2", "w3"]
    assert b"a secret" in row["body"]
    assert row["dead_at"] == await db.fetchval("SELECT completed_at FROM requests")  # The only audit row.
    assert (other["request_id"], other["is_new"]) == (alone, True)


async def test_a_bad_dead_letter_is_set_aside_alone(
    client: Redis, postgres_server: EmbeddedPostgres, database_url: str, db: Connection
) -> None:
    """Requests and other dead letters are written; neither errors nor PostgreSQL's log contain its input."""
    canary = "a customer's canary"
    good, bad_customer, bad_text, *others = new_ids(10)
    failed = ENDS["failed"]
    await put(
        client,
        [accepted(i) for i in (good, bad_customer, bad_text, *others)],
        [ended(bad_customer, **failed), dead(bad_customer, canary, customer_id="nobody")],
        [ended(bad_text, **failed), dead(bad_text, canary, worker_ids=["nul\x00"]), dead("req_short", canary)],
        [["d", good, "too short"]],
        [ended(good, **failed), dead(good, input_="x" * 100_000)],
        [ended(i) for i in others],
    )
    auditor = await audit(database_url, client)

    assert await db.fetchval("SELECT array_agg(request_id) FROM dead_letters") == [good]
    assert await db.fetchval("SELECT count(*) FROM requests WHERE status IN ('completed', 'failed')") == 10
    entries = await client.lrange(KEYS.outbox_bad, 0, -1)
    ids = [record.id for entry in entries for record in decode_entry(entry)[0]]
    assert sorted(ids) == sorted([bad_customer, bad_text, "req_short"])
    assert len(entries) == auditor.set_aside == 4
    assert auditor.last_error is None
    log = f"{auditor.last_rejection}{(postgres_server.home.parent / 'postgres.log').read_text()}"
    assert "invalid byte sequence" in log
    assert "canary" not in log
    assert b"canary".hex() not in log


async def test_large_dead_letters_are_written_in_several_transactions(db: Connection) -> None:
    """The size of one transaction is limited."""
    await writer.prepare(db)
    batch = await make_batch(Folded([dead(i, input_="x" * 250_000) for i in new_ids(100)]))

    assert await writer.write_rows(db, batch.known, 5.0) == []

    assert await db.fetchval("SELECT count(*) FROM dead_letters") == 100
    assert await db.fetchval("SELECT count(DISTINCT xmin::text) FROM dead_letters") == 4


async def test_old_dead_letters_are_deleted(client: Redis, database_url: str, db: Connection) -> None:
    """Dead letters are deleted after thirty days, at most `letters_limit` in one statement."""
    insert = (
        "INSERT INTO dead_letters (request_id, error_code, dead_at) "
        "VALUES ($1, 'worker_lost', now() - make_interval(secs => $2))"
    )
    for request_id, days in zip(new_ids(4), (29, 30.5, 31, 400), strict=True):
        await db.execute(insert, request_id, days * 86_400)
    left = "SELECT count(*) = 1 AND min(dead_at) > now() - interval '30 days' FROM dead_letters"
    async with running(auditor_for(database_url, client, maintenance=MaintenancePolicy(letters_limit=1))):
        await eventually(lambda: db.fetchval(left), "the old ones are deleted")
