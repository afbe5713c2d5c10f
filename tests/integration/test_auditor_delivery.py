"""Several records of one request in every order and split, and dead letters."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pytest
from redis.asyncio import Redis

from eventually import eventually
from integration.auditor_bench import CUSTOMER, KEYS, accepted, auditor_for, dead, drained, ended, new_ids, put, running
from integration.ledger_fixtures import database_url, db, postgres_server
from ledger.audit import writer
from ledger.audit.maintenance import MaintenancePolicy
from ledger.audit.rows import Folded
from ledger.audit.writer import make_batch
from scheduler.protocol.audit_outbox import Record, decode_entry
from tierlane.embedded.postgres import EmbeddedPostgres

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any
# Each kind of end is known again by its batch.
FAILED: dict[str, Any] = {"state": "failed", "error_code": "worker_lost", "batch_id": "failed"}
ENDS: dict[str, dict[str, Any]] = {
    "failed": FAILED,
    "completed": {"batch_id": "completed"},
    "told": {"batch_id": "told", "mode": "direct", "delivered": True},
    "told failure": FAILED | {"batch_id": "told failure", "mode": "direct", "delivered": True},
    "told timeout": {
        "state": "failed",
        "error_code": "deadline_exceeded",
        "batch_id": "told timeout",
        "mode": "direct",
        "delivered": True,
    },
}


def sequences() -> Iterator[tuple[str, ...]]:
    """Every order of up to three records, repeats included; of three, those in which a client is told one thing only."""
    for length in (1, 2, 3):
        for kinds in product(("accepted", *ENDS), repeat=length):
            if length < 3 or "told failure" not in kinds or not {"told", "told timeout"} & set(kinds):
                yield kinds


def splits(kinds: Sequence[str]) -> Iterator[list[Sequence[str]]]:
    """Every way to cut a sequence into transactions."""
    for cuts in product((False, True), repeat=len(kinds) - 1):
        parts: list[list[str]] = [[kinds[0]]]
        for cut, kind in zip(cuts, kinds[1:], strict=True):
            if cut:
                parts.append([kind])
            else:
                parts[-1].append(kind)
        yield list(parts)


def customer_limits(kinds: Sequence[str]) -> str | None:
    """The rule, in words: the first end stands, but another one that a client was told beats one that nobody was told.

    A 504 that was told beats a result that was noted to be told.
    """
    ends = [kind for kind in kinds if kind != "accepted"]
    if not ends:
        return None
    replaced_by = {
        "failed": ("told timeout", "told"),
        "completed": ("told timeout", "told failure"),
        "told": ("told timeout",),
    }
    return next((other for other in replaced_by.get(ends[0], ()) if other in ends), ends[0])


def record(kind: str, request_id: str) -> Record:
    return accepted(request_id) if kind == "accepted" else ended(request_id, **ENDS[kind])


async def write(db: Connection, records: Sequence[Record]) -> None:
    """Write records as the auditor does."""
    batch = await make_batch(Folded(records))
    assert await writer.write_rows(db, batch.new, 10.0, new=True) == []
    for rows in (batch.known, batch.later):
        assert await writer.write_rows(db, rows, 10.0) == []


async def test_every_order_and_split_ends_the_same(db: Connection) -> None:
    """Each order and split of records gives one row with all fields of the end that the rule selects."""
    cases = [(kinds, parts) for kinds in sequences() for parts in splits(kinds)]
    ids = new_ids(len(cases))
    await writer.prepare(db)
    for turn in (0, 1, 2):
        records = [
            record(kind, request_id)
            for request_id, (_, parts) in zip(ids, cases, strict=True)
            for kind in (parts[turn] if turn < len(parts) else ())
        ]
        await write(db, records)

    rows = await db.fetch("SELECT id, tier, status, error_code, http_status, batch_id, mode, delivered FROM requests")
    found = {row["id"]: tuple(row)[1:] for row in rows}
    assert len(rows) == len(cases) > 300
    wrong = {}
    for request_id, (kinds, parts) in zip(ids, cases, strict=True):
        kind = customer_limits(kinds)
        end = ENDS[kind] if kind else {}
        failed = "error_code" in end
        expected = (
            "paid" if "accepted" in kinds else None,
            "queued" if kind is None else "failed" if failed else "completed",
            end.get("error_code"),
            None if kind is None else 504 if kind == "told timeout" else 503 if failed else 200,
            kind,
            None if kind is None else end.get("mode", "queue"),
            None if kind is None else end.get("delivered", False),
        )
        if found[request_id] != expected:
            wrong[str(parts)] = found[request_id]
    assert wrong == {}


@pytest.mark.parametrize("kind", ENDS)
async def test_any_end_replaces_abandoned_and_is_not_replaced_by_it(db: Connection, kind: str) -> None:
    """A recorded end replaces `abandoned`, and is not replaced by a later one."""
    (request_id,) = new_ids(1)
    await writer.prepare(db)
    await write(db, [accepted(request_id)])
    await db.execute("UPDATE requests SET status = 'failed', error_code = 'abandoned', http_status = 504")
    await write(db, [accepted(request_id)])
    assert await db.fetchval("SELECT error_code FROM requests") == "abandoned"

    await write(db, [record(kind, request_id)])
    await write(db, [record("failed", request_id)])

    assert await db.fetchval("SELECT batch_id FROM requests") == kind


async def test_dead_letters_are_written_with_their_rows(client: Redis, database_url: str, db: Connection) -> None:
    """A dead letter is written once with its body, however often its record arrives."""
    (request_id,) = new_ids(1)
    records = [ended(request_id, **FAILED), dead(request_id, input_="a secret")]
    await put(client, [accepted(request_id)], records, records, [dead(request_id, error_code="poison_request")])
    async with running(auditor_for(database_url, client)):
        await eventually(lambda: drained(client), "the outbox is empty")

    (row,) = await db.fetch("SELECT * FROM dead_letters")
    assert (row["request_id"], str(row["customer_id"]), row["tier"], row["model"]) == (
        request_id,
        CUSTOMER,
        "paid",
        "tiny",
    )
    assert (row["error_code"], row["attempts"], row["worker_ids"]) == ("worker_lost", 3, ["w1", "w2", "w3"])
    assert b"a secret" in row["body"]
    assert row["dead_at"] == await db.fetchval("SELECT completed_at FROM requests")
    assert (row["requeued_as"], row["requeued_at"]) == (None, None)


async def test_a_dead_letter_may_come_alone(client: Redis, database_url: str, db: Connection) -> None:
    """A dead letter without the records of its request is written, without an audit row."""
    (request_id,) = new_ids(1)
    await put(client, [dead(request_id)])
    async with running(auditor_for(database_url, client)):
        await eventually(lambda: drained(client), "the outbox is empty")

    assert await db.fetchval("SELECT dead_at > now() - interval '10 s' FROM dead_letters")
    assert await db.fetchval("SELECT count(*) FROM requests") == 0


async def test_a_bad_dead_letter_is_set_aside_alone(
    client: Redis, postgres_server: EmbeddedPostgres, database_url: str, db: Connection
) -> None:
    """One that cannot be decoded, one with a bad id, one that PostgreSQL refuses: rows and other letters are written.

    What is told of the refused ones, by us or in PostgreSQL's log, shows nothing of their input.
    """
    canary = "a customer's canary"
    good, bad_customer, bad_text, *others = new_ids(10)
    await put(
        client,
        [accepted(i) for i in (good, bad_customer, bad_text, *others)],
        [ended(bad_customer, **FAILED), dead(bad_customer, canary, customer_id="nobody")],
        [ended(bad_text, **FAILED), dead(bad_text, canary, worker_ids=["nul\x00"]), dead("req_short", canary)],
        [["d", good, "too short"]],
        [ended(good, **FAILED), dead(good, input_="x" * 100_000)],
        [ended(i) for i in others],
    )
    auditor = auditor_for(database_url, client)
    async with running(auditor):
        await eventually(lambda: drained(client), "the outbox is empty")

    assert await db.fetchval("SELECT array_agg(request_id) FROM dead_letters") == [good]
    assert await db.fetchval("SELECT count(*) FROM requests WHERE status IN ('completed', 'failed')") == 10
    aside = await client.lrange(KEYS.outbox_bad, 0, -1)
    read = [record.id for entry in aside for record in decode_entry(entry)[0]]
    assert sorted(read) == sorted([bad_customer, bad_text, "req_short"])
    assert len(aside) == auditor.set_aside == 4
    assert auditor.last_error is None
    told = f"{auditor.last_refusal}{auditor.last_error}{(postgres_server.home.parent / 'postgres.log').read_text()}"
    assert "invalid byte sequence" in told
    assert "canary" not in told
    assert b"canary".hex() not in told


async def test_many_large_dead_letters_are_written_in_parts(db: Connection) -> None:
    """Large dead letters are written in several transactions."""
    await writer.prepare(db)
    ids = new_ids(100)
    batch = await make_batch(Folded([dead(i, input_="x" * 250_000) for i in ids]))

    assert await writer.write_rows(db, batch.known, 5.0) == []

    assert await db.fetchval("SELECT count(*) FROM dead_letters") == 100
    assert await db.fetchval("SELECT count(DISTINCT xmin::text) FROM dead_letters") == 4


async def test_old_dead_letters_are_deleted(client: Redis, database_url: str, db: Connection) -> None:
    """Dead letters are deleted after thirty days, a bounded number at a time."""
    for n, days in enumerate([29, 30.5, 31, 400]):
        await db.execute(
            "INSERT INTO dead_letters (request_id, error_code, dead_at) "
            "VALUES ($1, 'worker_lost', now() - make_interval(secs => $2))",
            new_ids(1)[0],
            days * 86_400 + n,
        )
    async with running(auditor_for(database_url, client, maintenance=MaintenancePolicy(letters_limit=1))):

        async def left() -> bool:
            return bool(await db.fetchval("SELECT count(*) = 1 FROM dead_letters"))

        await eventually(left, "the old ones are gone")
    assert await db.fetchval("SELECT dead_at > now() - interval '30 days' FROM dead_letters")
